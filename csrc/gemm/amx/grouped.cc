// int8 tiles for the grouped formats whose groups of 32 columns have one scale and no minimum. Up to
// kFewTokens and everywhere else the avx512 cells do; they have the same bits.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <type_traits>
#include <utility>

#include "gemm/amx/tile.h"
#include "gemm/grouped_cells.h"
#include "gemm/grouped_panels.h"
#include "gemm/panel.h"
#include "gemm/quantized_act.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace amx {
namespace {

#include "gemm/avx512/vec.h"
// For packed groups as vectors; the loops over few tokens are those of the avx512 cells.
constexpr int kTokenCounts[] = {1};

#include "gemm/avx512/grouped-inl.h"

using format::kPanelRows;

// Fewer tokens do not pay for unpacking the weights to memory.
constexpr int64_t kFewTokens = 17;
// Columns are taken in chunks: the unpacked weights of a chunk of one panel stay in the L1 cache, the
// activations of all tokens of a pass in the L2 cache. A chunk is whole super-blocks.
constexpr int64_t kChunkGroups = 32;
constexpr int64_t kChunkColumns = kChunkGroups * kGroup;
constexpr int64_t kTokensPerPass = 256;
constexpr int64_t kBlocksPerPass = kTokensPerPass / kTileRows;
constexpr int64_t kQuadRows = 8;  // of a weight tile: 4 columns each
constexpr int64_t kGroupBytes = kQuadRows * kTileRowBytes;
// Of rows that were brought together: see gemm/row_stride.h.
constexpr int64_t kCopiedRowBytes = spread_row_bytes(kChunkColumns);
constexpr int64_t kTileFloats = kTileRows * kPanelRows;

constexpr int kSumTile = 0, kActTile = 1, kWeightTile = 2;

// A chunk of one panel: int8 weights as tiles of one group, and their scales.
struct WeightChunk {
  alignas(64) std::byte q[kChunkGroups][kGroupBytes];
  alignas(64) float scale[kChunkGroups][kPanelRows];
};

struct Scratch {
  WeightChunk weights;
  alignas(64) int32_t dots[2][kTileFloats];  // of two groups, in turn
  alignas(64) float act_scale[kBlocksPerPass][kTileRows][kChunkGroups];
  alignas(64) std::byte acts[kTokensPerPass][kCopiedRowBytes];
};

// A chunk of the columns of all tokens of a pass.
struct Chunk {
  int64_t first_group, groups;
  int64_t first_token, num_tokens;
};

// Where the chunk's activations stand, with rows `stride` bytes apart.
struct ActChunk {
  const std::byte* first;
  int64_t stride;
};

// Rows of the same distance are read where they are, others are brought together; scales always are.
ActChunk act_chunk(const GemmArgs& args, const Chunk& chunk, Scratch& scratch) noexcept {
  const int64_t offset = chunk.first_group * kGroup;
  for (int64_t m = 0; m < chunk.num_tokens; ++m) {
    const std::byte* row = args.x.row(chunk.first_token + m);
    std::memcpy(scratch.act_scale[m / kTileRows][m % kTileRows],
                quantized_row(row, args.shape.in_features).scale + chunk.first_group,
                static_cast<size_t>(chunk.groups) * sizeof(float));
    if (args.x.index != nullptr)
      std::memcpy(scratch.acts[m], row + offset, static_cast<size_t>(chunk.groups * kGroup));
  }
  if (args.x.index == nullptr) return {args.x.row(chunk.first_token) + offset, args.x.stride_bytes};
  return {scratch.acts[0], kCopiedRowBytes};
}

// Unpacks `groups` groups from the start of a super-block on; returns what follows them.
template <class F>
const std::byte* unpack(const std::byte* super, int64_t groups, WeightChunk& chunk) noexcept {
  using Layout = format::GroupedLayout<F>;
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(F::kOffset));
  for (int64_t g = 0; g < groups; g += Layout::kGroups) {
    const int64_t count = std::min(Layout::kGroups, groups - g);
    const SuperScales<F> scales(super, count);
    for (int64_t i = 0; i < count; ++i) {
      __m512i quads[8];
      load_quads<F>(super + i * Layout::kGroupBytes, quads);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j)
        _mm512_store_si512(chunk.q[g + i] + kTileRowBytes * j, _mm512_sub_epi8(quads[j], offset));
      _mm512_store_ps(chunk.scale[g + i], scales.scale(i * kGroup));
    }
    super += Layout::super_bytes(count);
  }
  return super;
}

// What a block of tokens meets, and what is requested meanwhile: a line for each group.
struct Operands {
  ActChunk acts;  // of the block
  const float* act_scale;
  int64_t groups;
  const std::byte* ahead;
};

// total[m] = fma(dot, weight scale * activation scale, total[m])
template <int M>
inline void add_group(const int32_t* dots, const float* weight_scale, const float* act_scale,
                      Vec (&total)[M]) noexcept {
  const Vec scale = Vec::load(weight_scale);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const Vec dot{_mm512_cvtepi32_ps(_mm512_load_si512(dots + kPanelRows * m))};
    total[m] = Vec::fma(dot, Vec::mul(scale, Vec::set1(act_scale[kChunkGroups * m])), total[m]);
  }
}

// M tokens; the first chunk of columns starts the totals at `out`. The dot products of a group are stored
// while those of the group before are scaled: larger batches were slower.
template <int M>
void multiply_block(const Operands& x, bool first, float* out, int64_t out_stride, int lanes,
                    Scratch& scratch) noexcept {
  const WeightChunk& weights = scratch.weights;
  Vec total[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m] = first ? Vec::zero() : Vec::load_first(out + m * out_stride, lanes);
  for (int64_t g = 0; g < x.groups; ++g) {
    tile_load<kActTile>(x.acts.first + g * kGroup, x.acts.stride);
    tile_load<kWeightTile>(weights.q[g], kTileRowBytes);
    tile_zero<kSumTile>();
    tile_dot_int8<kSumTile, kActTile, kWeightTile>();
    _mm_prefetch(reinterpret_cast<const char*>(x.ahead + 64 * g), _MM_HINT_T1);
    if (g > 0) add_group<M>(scratch.dots[(g - 1) % 2], weights.scale[g - 1], x.act_scale + g - 1, total);
    tile_store<kSumTile>(scratch.dots[g % 2], kTileRowBytes);
  }
  const int64_t last = x.groups - 1;
  add_group<M>(scratch.dots[last % 2], weights.scale[last], x.act_scale + last, total);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m].store_first(out + m * out_stride, lanes);
}

using BlockFn = void (*)(const Operands&, bool, float*, int64_t, int, Scratch&) noexcept;

template <int... M>
constexpr std::array<BlockFn, sizeof...(M)> block_table(std::integer_sequence<int, M...>) {
  return {multiply_block<M + 1>...};
}

// kBlockFns[m - 1] multiplies m tokens.
constexpr auto kBlockFns = block_table(std::make_integer_sequence<int, kTileRows>{});

void configure(int64_t tokens) noexcept {
  TileConfig config;
  config.set(kSumTile, tokens, kTileRowBytes);
  config.set(kActTile, tokens, kGroup);
  config.set(kWeightTile, kQuadRows, kTileRowBytes);
  config.load();
}

// The unpacked chunk of one panel with all tokens of the pass; `next` is unpacked after it.
void multiply_panel_chunk(const GemmArgs& args, const Chunk& chunk, int64_t panel, const ActChunk& acts,
                          const std::byte* next, Scratch& scratch) noexcept {
  const int lanes = valid_rows(args, panel);
  float* out = args.out + chunk.first_token * args.out_stride + (panel - args.panel_begin) * kPanelRows;
  for (int64_t m = 0; m < chunk.num_tokens; m += kTileRows) {
    const int64_t tokens = std::min(kTileRows, chunk.num_tokens - m), block = m / kTileRows;
    if (block == 0 || tokens < kTileRows) configure(tokens);
    const Operands x{{acts.first + m * acts.stride, acts.stride},
                     scratch.act_scale[block][0],
                     chunk.groups,
                     next + 64 * block * chunk.groups};
    kBlockFns[static_cast<size_t>(tokens - 1)](x, chunk.first_group == 0, out + m * args.out_stride,
                                               args.out_stride, lanes, scratch);
  }
}

template <class F>
void multiply_chunk(const GemmArgs& args, const Chunk& chunk, Scratch& scratch) noexcept {
  using Layout = format::GroupedLayout<F>;
  const int64_t panel_bytes = format::panel_bytes(F::kFormat, args.shape.in_features);
  const std::byte* first =
      args.weight + chunk.first_group / Layout::kGroups * Layout::super_bytes(Layout::kGroups);
  const ActChunk acts = act_chunk(args, chunk, scratch);
  for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
    const std::byte* end = unpack<F>(first + panel * panel_bytes, chunk.groups, scratch.weights);
    // After the last panel come the next columns of the first one.
    const std::byte* next = panel + 1 < args.panel_end ? first + (panel + 1) * panel_bytes
                                                       : end - (panel - args.panel_begin) * panel_bytes;
    multiply_panel_chunk(args, chunk, panel, acts, next, scratch);
  }
}

template <class F>
void gemm_tiles(const GemmArgs& args) noexcept {
  if (args.num_tokens < kFewTokens) return cell_of(avx512_vnni_grouped_cells(), F::kFormat).gemm(args);
  const TileRelease release;
  Scratch scratch;
  const int64_t all_groups = args.shape.in_features / kGroup;
  for (int64_t m = 0; m < args.num_tokens; m += kTokensPerPass)
    for (int64_t g = 0; g < all_groups; g += kChunkGroups)
      multiply_chunk<F>(
          args, {g, std::min(kChunkGroups, all_groups - g), m, std::min(kTokensPerPass, args.num_tokens - m)},
          scratch);
}

template <class F>
inline constexpr bool kTiled = !F::kMinimum && !F::kRowScale && format::GroupedLayout<F>::kHalves == 1;

// The formats of a list that tiles can multiply.
template <class List>
struct Tiled;
template <>
struct Tiled<format::FormatList<>> {
  using Type = format::FormatList<>;
};
template <class F, class... Rest>
struct Tiled<format::FormatList<F, Rest...>> {
  template <class... T>
  static format::FormatList<F, T...> with(format::FormatList<T...>);
  using Others = typename Tiled<format::FormatList<Rest...>>::Type;
  using Type = std::conditional_t<kTiled<F>, decltype(with(Others{})), Others>;
};

struct Cells {
  static constexpr char kPrefix[] = "amx.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name,           cpu::kAmxTier | cpu::kAvx512Vnni, F::kFormat,
            kGroupedAct<F>, format::reject_grouped<F>,        quantize<F>,
            gemm_tiles<F>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(Tiled<format::GroupedFormats>::Type{});

}  // namespace
}  // namespace amx

std::span<const Kernel> amx_grouped_cells() noexcept { return amx::kCells; }

}  // namespace proa::gemm

#pragma GCC pop_options
