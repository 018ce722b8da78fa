// int8 tiles for the grouped formats whose groups of 32 columns have one scale and no minimum. Up to
// kFewTokens and everywhere else the avx512 cells do; they have the same bits.
//
// Half a tile is empty with 32 columns, so 16 tokens of which one has a high plane (act_budget.h) put it
// there: rows q | high of the activations times w | 8 * w of the weights are q * w + 8 * high * w. Where 8 *
// w is no int8, the high plane is a product of its own.
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
#include "gemm/grouped_tokens.h"
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
constexpr int kBlockTokens = 1;

#include "gemm/avx512/grouped-inl.h"

using format::kPanelRows;

// Fewer tokens do not pay for unpacking the weights to memory (benchmarks/LOG.md, "prompts of few tokens").
constexpr int64_t kFewTokens = 13;
// Columns are taken in chunks: the unpacked weights of a chunk of one panel stay in the L1 cache, the
// activations of all tokens of a pass in the L2 cache. A chunk is whole super-blocks.
constexpr int64_t kChunkGroups = 32;
constexpr int64_t kChunkColumns = kChunkGroups * kGroup;
constexpr int64_t kTokensPerPass = 256;
constexpr int64_t kBlocksPerPass = kTokensPerPass / kTileRows;
constexpr int64_t kQuadRows = 8;                             // of a weight tile: 4 columns each
constexpr int64_t kWeightBytes = kQuadRows * kTileRowBytes;  // of a group
// Of rows that were brought together, high plane included: see gemm/row_stride.h.
constexpr int64_t kCopiedRowBytes = spread_row_bytes(2 * kChunkColumns);
constexpr int64_t kTileFloats = kTileRows * kPanelRows;

constexpr int kSumTile = 0, kActTile = 1, kWeightTile = 2;
constexpr int kPairActTile = 3, kPairWeightTile = 4;  // of two planes
constexpr int kHighSumTile = 5;

// What the activations of 16 tokens are: one plane, or two, whose products go to one sum or to two.
enum Planes : uint8_t { kOne, kJoined, kApart };

// Largest |w|.
template <class F>
inline constexpr int kMostWeight =
    F::kOffset > format::kLargestCode<F> - F::kOffset ? F::kOffset : format::kLargestCode<F> - F::kOffset;

// -16 << 3 is an int8.
template <class F>
inline constexpr Planes kTwo = kMostWeight<F> <= 16 ? kJoined : kApart;

// A chunk of one panel: int8 weights as tiles of one group, `group_bytes` apart, and their scales.
struct WeightChunk {
  alignas(64) std::byte q[kChunkGroups * 2 * kWeightBytes];
  alignas(64) float scale[kChunkGroups][kPanelRows];
  int64_t group_bytes;  // 2 * kWeightBytes with 8 * w behind w
};

struct Scratch {
  WeightChunk weights;
  alignas(64) int32_t dots[2][2][kTileFloats];  // of two groups, in turn: q, high
  alignas(64) float act_scale[kBlocksPerPass][kChunkGroups][kTileRows];
  alignas(64) std::byte acts[kTokensPerPass][kCopiedRowBytes];
};

// A chunk of the columns of all tokens of a pass.
struct Chunk {
  int64_t first_group, groups;
  int64_t first_token, num_tokens;
};

// Where the chunk's activations of 16 tokens stand, with rows `stride` and groups `step` bytes apart.
struct ActBlock {
  const std::byte* first;
  int64_t stride, step;
  Planes planes;
  const float* scale;  // [kChunkGroups][kTileRows]
};

#include "gemm/amx/grouped_block-inl.h"

// Tokens of a chunk, from `first` of the pass on.
template <class F>
ActBlock tiled_block(const GemmArgs& args, const Chunk& chunk, int64_t first) noexcept {
  const BlockLayout layout(args.shape.in_features);
  const std::byte* block = args.x.row(chunk.first_token + first);
  const bool fine = block[layout.fine + chunk.first_group / kChunkGroups] != std::byte{0};
  const int64_t row_bytes = fine ? 2 * kGroup : kGroup;
  return {block + 2 * chunk.first_group * kGroup * kTileRows, row_bytes, row_bytes * kTileRows,
          fine ? kTwo<F> : kOne,
          reinterpret_cast<const float*>(block + layout.scales) + chunk.first_group * kTileRows};
}

// The tokens of block `block`. Rows of one plane, at one distance, are read where they are, others are
// brought together; scales always are.
template <class F>
ActBlock act_block(const GemmArgs& args, const Chunk& chunk, int64_t block, Scratch& scratch) noexcept {
  const int64_t first = block * kTileRows, count = std::min(kTileRows, chunk.num_tokens - first);
  if (args.x.tiled) return tiled_block<F>(args, chunk, first);
  QuantizedRow rows[kTileRows];
  uint32_t fine[kTileRows], any = 0;
  for (int64_t m = 0; m < count; ++m) {
    rows[m] = quantized_row<F>(args.x.row(chunk.first_token + first + m), args.shape.in_features);
    for (int64_t g = 0; g < chunk.groups; ++g)
      scratch.act_scale[block][g][m] = rows[m].scale[chunk.first_group + g];
    any |= fine[m] = fine_groups(rows[m], chunk);
  }
  const int64_t column = chunk.first_group * kGroup;
  const float* scale = scratch.act_scale[block][0];
  if (any == 0 && args.x.index == nullptr)
    return {reinterpret_cast<const std::byte*>(rows[0].q) + column, args.x.stride_bytes, kGroup, kOne, scale};
  for (int64_t m = 0; m < count; ++m)
    if (any != 0)
      join_planes(rows[m], chunk, fine[m], 2 * kGroup, scratch.acts[first + m]);
    else
      std::memcpy(scratch.acts[first + m], rows[m].q + column, static_cast<size_t>(chunk.groups * kGroup));
  return any != 0 ? ActBlock{scratch.acts[first], kCopiedRowBytes, 2 * kGroup, kTwo<F>, scale}
                  : ActBlock{scratch.acts[first], kCopiedRowBytes, kGroup, kOne, scale};
}

// The codes of a group as a tile of w, and 8 * w behind it.
template <class F>
inline void unpack_group(const std::byte* codes, bool joined, std::byte* dst) noexcept {
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(F::kOffset));
  __m512i quads[8];
  load_quads<F>(codes, quads);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    quads[j] = _mm512_sub_epi8(quads[j], offset);
    _mm512_store_si512(dst + kTileRowBytes * j, quads[j]);
  }
  if (!joined) return;
  const __m512i kept = _mm512_set1_epi8(static_cast<char>(0xff << kHighShift));
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j)
    _mm512_store_si512(dst + kWeightBytes + kTileRowBytes * j,
                       _mm512_and_si512(_mm512_slli_epi16(quads[j], kHighShift), kept));
}

// Unpacks `groups` groups from the start of a super-block on; returns what follows them.
template <class F>
const std::byte* unpack(const std::byte* super, int64_t groups, WeightChunk& chunk) noexcept {
  using Layout = format::GroupedLayout<F>;
  const bool joined = chunk.group_bytes > kWeightBytes;
  for (int64_t g = 0; g < groups; g += Layout::kGroups) {
    const int64_t count = std::min(Layout::kGroups, groups - g);
    const SuperScales<F> scales(super, count);
    for (int64_t i = 0; i < count; ++i) {
      unpack_group<F>(super + i * Layout::kGroupBytes, joined, chunk.q + (g + i) * chunk.group_bytes);
      _mm512_store_ps(chunk.scale[g + i], scales.scale(i * kGroup));
    }
    super += Layout::super_bytes(count);
  }
  return super;
}

// What a block of tokens meets, and what is requested meanwhile: a line for each group.
struct Operands {
  ActBlock acts;
  int64_t groups;
  const std::byte* ahead;
};

// total[m] = fma(dot, weight scale * activation scale, total[m])
template <int M, Planes kPlanes>
inline void add_group(const int32_t (&dots)[2][kTileFloats], const float* weight_scale,
                      const float* act_scale, Vec (&total)[M]) noexcept {
  const Vec scale = Vec::load(weight_scale);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    __m512i dot = _mm512_load_si512(dots[0] + kPanelRows * m);
    if constexpr (kPlanes == kApart)
      dot = _mm512_add_epi32(dot, _mm512_slli_epi32(_mm512_load_si512(dots[1] + kPanelRows * m), kHighShift));
    total[m] = Vec::fma({_mm512_cvtepi32_ps(dot)}, Vec::mul(scale, Vec::set1(act_scale[m])), total[m]);
  }
}

// The dot products of group g.
template <Planes kPlanes>
inline void multiply_group(const Operands& x, int64_t g, const WeightChunk& weights) noexcept {
  const std::byte* acts = x.acts.first + g * x.acts.step;
  const std::byte* weight = weights.q + g * weights.group_bytes;
  if constexpr (kPlanes == kJoined) {
    tile_load<kPairActTile>(acts, x.acts.stride);
    tile_load<kPairWeightTile>(weight, kTileRowBytes);
    tile_zero<kSumTile>();
    tile_dot_int8<kSumTile, kPairActTile, kPairWeightTile>();
    return;
  }
  tile_load<kActTile>(acts, x.acts.stride);
  tile_load<kWeightTile>(weight, kTileRowBytes);
  tile_zero<kSumTile>();
  tile_dot_int8<kSumTile, kActTile, kWeightTile>();
  if constexpr (kPlanes == kApart) {
    tile_load<kActTile>(acts + kGroup, x.acts.stride);
    tile_zero<kHighSumTile>();
    tile_dot_int8<kHighSumTile, kActTile, kWeightTile>();
  }
}

// M tokens; the first chunk of columns starts the totals at `out`. The dot products of a group are stored
// while those of the group before are scaled: larger batches were slower.
template <Planes kPlanes, int M>
void multiply_block(const Operands& x, bool first, float* out, int64_t out_stride, int lanes,
                    Scratch& scratch) noexcept {
  const WeightChunk& weights = scratch.weights;
  Vec total[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m] = first ? Vec::zero() : Vec::load_first(out + m * out_stride, lanes);
  for (int64_t g = 0; g < x.groups; ++g) {
    multiply_group<kPlanes>(x, g, weights);
    _mm_prefetch(reinterpret_cast<const char*>(x.ahead + 64 * g), _MM_HINT_T1);
    if (g > 0)
      add_group<M, kPlanes>(scratch.dots[(g - 1) % 2], weights.scale[g - 1],
                            x.acts.scale + (g - 1) * kTileRows, total);
    tile_store<kSumTile>(scratch.dots[g % 2][0], kTileRowBytes);
    if constexpr (kPlanes == kApart) tile_store<kHighSumTile>(scratch.dots[g % 2][1], kTileRowBytes);
  }
  const int64_t last = x.groups - 1;
  add_group<M, kPlanes>(scratch.dots[last % 2], weights.scale[last], x.acts.scale + last * kTileRows, total);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m].store_first(out + m * out_stride, lanes);
}

using BlockFn = void (*)(const Operands&, bool, float*, int64_t, int, Scratch&) noexcept;

template <Planes kPlanes, int... M>
constexpr std::array<BlockFn, sizeof...(M)> block_table(std::integer_sequence<int, M...>) {
  return {multiply_block<kPlanes, M + 1>...};
}

// [planes][m - 1] multiplies m tokens.
using EveryCount = std::make_integer_sequence<int, kTileRows>;
constexpr std::array kBlockFns = {block_table<kOne>(EveryCount{}), block_table<kJoined>(EveryCount{}),
                                  block_table<kApart>(EveryCount{})};

void configure(int64_t tokens) noexcept {
  TileConfig config;
  config.set(kSumTile, tokens, kTileRowBytes);
  config.set(kActTile, tokens, kGroup);
  config.set(kWeightTile, kQuadRows, kTileRowBytes);
  config.set(kPairActTile, tokens, 2 * kGroup);
  config.set(kPairWeightTile, 2 * kQuadRows, kTileRowBytes);
  config.set(kHighSumTile, tokens, kTileRowBytes);
  config.load();
}

// The unpacked chunk of one panel with all tokens of the pass; `next` is unpacked after it.
void multiply_panel_chunk(const GemmArgs& args, const Chunk& chunk, int64_t panel, const ActBlock* acts,
                          const std::byte* next, Scratch& scratch) noexcept {
  const int lanes = valid_rows(args, panel);
  float* out = args.out + chunk.first_token * args.out_stride + (panel - args.panel_begin) * kPanelRows;
  for (int64_t m = 0; m < chunk.num_tokens; m += kTileRows) {
    const int64_t tokens = std::min(kTileRows, chunk.num_tokens - m), block = m / kTileRows;
    if (block == 0 || tokens < kTileRows) configure(tokens);
    const Operands x{acts[block], chunk.groups, next + 64 * block * chunk.groups};
    kBlockFns[x.acts.planes][static_cast<size_t>(tokens - 1)](
        x, chunk.first_group == 0, out + m * args.out_stride, args.out_stride, lanes, scratch);
  }
}

template <class F>
void multiply_chunk(const GemmArgs& args, const Chunk& chunk, Scratch& scratch) noexcept {
  using Layout = format::GroupedLayout<F>;
  const int64_t panel_bytes = format::panel_bytes(F::kFormat, args.shape.in_features);
  const std::byte* first =
      args.weight + chunk.first_group / Layout::kGroups * Layout::super_bytes(Layout::kGroups);
  ActBlock acts[kBlocksPerPass];
  scratch.weights.group_bytes = kWeightBytes;
  for (int64_t block = 0; block * kTileRows < chunk.num_tokens; ++block) {
    acts[block] = act_block<F>(args, chunk, block, scratch);
    if (acts[block].planes == kJoined) scratch.weights.group_bytes = 2 * kWeightBytes;
  }
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
  if (args.num_tokens < kFewTokens && !args.x.tiled)
    return cell_of(avx512_vnni_grouped_cells(), F::kFormat).gemm(args);
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
    return {name,
            cpu::kAmxTier | cpu::kAvx512Vnni,
            F::kFormat,
            kGroupedAct<F>,
            format::reject_grouped<F>,
            quantize<F>,
            gemm_tiles<F>,
            pack<F>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(Tiled<format::GroupedFormats>::Type{});

}  // namespace
}  // namespace amx

std::span<const Kernel> amx_grouped_cells() noexcept { return amx::kCells; }

}  // namespace proa::gemm

#pragma GCC pop_options
