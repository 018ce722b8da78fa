#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "format/int4.h"
#include "gemm/amx/avx512_parts.h"
#include "gemm/amx/tile.h"
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

using format::kInt4Group;
using format::kPanelRows;
using Layout = format::GroupedLayout<format::Int4G32>;
constexpr int64_t kBlockBytes = Layout::super_bytes(1);

// Fewer tokens do not pay for unpacking the weights to memory (even at about 20, measured): the avx512 cell
// has the same bits.
constexpr int64_t kFewTokens = 17;
// Columns are taken in chunks, so that the unpacked weights of a chunk stay in the L1 cache and the
// activations of all tokens of a pass in the L2 cache.
constexpr int64_t kChunkGroups = 32;
constexpr int64_t kTokensPerPass = 144;
constexpr int64_t kBlocksPerPass = kTokensPerPass / kTileRows;
constexpr int64_t kGroupRows = 8;  // of a weight tile: 4 columns each
constexpr int64_t kGroupBytes = kGroupRows * kTileRowBytes;

// Dot products of four groups are stored, then scaled: one at a time, the two would wait for each other.
constexpr int64_t kBatch = 4;
// Two panels share the tiles of the activations.
constexpr int sum_tile(int group, int panel) { return 2 * (group % 2) + panel; }
constexpr int act_tile(int group) { return 4 + group % 2; }
constexpr int weight_tile(int panel) { return 6 + panel; }

// A chunk of the activations of a pass: per 16 tokens, tiles of 16 rows with two groups each.
struct ActChunk {
  alignas(64) int8_t q[kBlocksPerPass][kChunkGroups / 2][kTileRows][2 * kInt4Group];
  alignas(64) float scale[kBlocksPerPass][kTileRows][kChunkGroups];
};

// A chunk of one panel: int8 weights as tiles of one group, and their scales.
struct WeightChunk {
  alignas(64) std::byte q[kChunkGroups][kGroupBytes];
  alignas(64) float scale[kChunkGroups][kPanelRows];
};

void copy_acts(const GemmArgs& args, int64_t first_token, int64_t num_tokens, int64_t first_group,
               int64_t groups, ActChunk& chunk) noexcept {
  for (int64_t m = 0; m < num_tokens; ++m) {
    const QuantizedRow row = quantized_row(args.x.row(first_token + m), args.shape.in_features);
    const int64_t block = m / kTileRows, lane = m % kTileRows;
    const int8_t* q = row.q + first_group * kInt4Group;
    int64_t g = 0;
    for (; g + 2 <= groups; g += 2, q += 2 * kInt4Group)
      _mm512_store_si512(chunk.q[block][g / 2][lane], _mm512_loadu_si512(q));
    if (g < groups) std::memcpy(chunk.q[block][g / 2][lane], q, kInt4Group);
    std::memcpy(chunk.scale[block][lane], row.scale + first_group,
                static_cast<size_t>(groups) * sizeof(float));
  }
}

// Unpacks `groups` blocks and requests those at `next`, which are unpacked after them.
void unpack(const std::byte* block, const std::byte* next, int64_t groups, WeightChunk& chunk) noexcept {
  const __m512i low_nibble = _mm512_set1_epi8(0x0f);
  const __m512i offset = _mm512_set1_epi8(format::Int4G32::kOffset);
  for (int64_t g = 0; g < groups; ++g, block += kBlockBytes, next += kBlockBytes) {
    for (int64_t line = 0; line < kBlockBytes; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(next + line), _MM_HINT_T0);
#pragma GCC unroll 4
    for (int64_t j = 0; j < 4; ++j) {
      const __m512i word = _mm512_loadu_si512(block + kTileRowBytes * j);
      const __m512i even = _mm512_and_si512(word, low_nibble);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(word, 4), low_nibble);
      _mm512_store_si512(chunk.q[g] + 2 * kTileRowBytes * j, _mm512_sub_epi8(even, offset));
      _mm512_store_si512(chunk.q[g] + 2 * kTileRowBytes * j + kTileRowBytes, _mm512_sub_epi8(odd, offset));
    }
    const auto* scales = reinterpret_cast<const __m256i*>(block + Layout::kGroupBytes);
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(scales)), 16);
    _mm512_store_ps(chunk.scale[g], _mm512_castsi512_ps(bits));
  }
}

// What one block of tokens meets: a chunk of the unpacked panels.
struct Operands {
  const int8_t* acts;          // ActChunk::q of the block
  const float* act_scale;      // and its scales
  const WeightChunk* weights;  // of each panel
  int64_t groups;
};

struct Scratch {
  ActChunk acts;
  WeightChunk weights[2];
  alignas(64) int32_t dots[2][kBatch][kTileRows * kPanelRows];  // of each panel
};

template <int Panels, int I>
inline void multiply_group(const Operands& x, int64_t group, Scratch& scratch) noexcept {
  constexpr int64_t kPairBytes = kTileRows * 2 * kInt4Group;
  if (group >= x.groups) return;
  tile_load<act_tile(I)>(x.acts + group / 2 * kPairBytes + I % 2 * kInt4Group, 2 * kInt4Group);
  tile_load<weight_tile(0)>(x.weights[0].q[group], kTileRowBytes);
  tile_zero<sum_tile(I, 0)>();
  tile_dot_int8<sum_tile(I, 0), act_tile(I), weight_tile(0)>();
  if constexpr (Panels > 1) {
    tile_load<weight_tile(1)>(x.weights[1].q[group], kTileRowBytes);
    tile_zero<sum_tile(I, 1)>();
    tile_dot_int8<sum_tile(I, 1), act_tile(I), weight_tile(1)>();
  }
  // The products of the group before have had time to end.
  if constexpr (I % 2 == 0) return;
  tile_store<sum_tile(I - 1, 0)>(scratch.dots[0][I - 1], kTileRowBytes);
  tile_store<sum_tile(I, 0)>(scratch.dots[0][I], kTileRowBytes);
  if constexpr (Panels > 1) {
    tile_store<sum_tile(I - 1, 1)>(scratch.dots[1][I - 1], kTileRowBytes);
    tile_store<sum_tile(I, 1)>(scratch.dots[1][I], kTileRowBytes);
  }
}

// The dot products of the last group, when it has none to be stored with.
template <int Panels, int I>
inline void store_last(Scratch& scratch) noexcept {
  tile_store<sum_tile(I, 0)>(scratch.dots[0][I], kTileRowBytes);
  if constexpr (Panels > 1) tile_store<sum_tile(I, 1)>(scratch.dots[1][I], kTileRowBytes);
}

template <int Panels>
inline void multiply_batch(const Operands& x, int64_t group, Scratch& scratch) noexcept {
  multiply_group<Panels, 0>(x, group, scratch);
  multiply_group<Panels, 1>(x, group + 1, scratch);
  multiply_group<Panels, 2>(x, group + 2, scratch);
  multiply_group<Panels, 3>(x, group + 3, scratch);
  if (x.groups - group == 1) store_last<Panels, 0>(scratch);
  if (x.groups - group == 3) store_last<Panels, 2>(scratch);
}

// total[m] = fma(dot, weight scale * activation scale, total[m])
template <int M>
inline void add_group(const int32_t* dots, const float* weight_scale, const float* act_scale,
                      Vec (&total)[M]) noexcept {
  const Vec scale = Vec::load(weight_scale);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    const Vec dot{_mm512_cvtepi32_ps(_mm512_load_si512(dots + kTileRows * m))};
    total[m] = Vec::fma(dot, Vec::mul(scale, Vec::set1(act_scale[kChunkGroups * m])), total[m]);
  }
}

// M tokens of a block with two panels or one. `out` is where each panel's totals stand; the first chunk of
// columns starts them.
template <int Panels, int M>
void multiply_block(const Operands& x, bool first, float* const (&out)[2], int64_t out_stride,
                    const int (&lanes)[2], Scratch& scratch) noexcept {
  alignas(64) float totals[Panels][kTileRows * kPanelRows];
  for (int p = 0; p < Panels; ++p)
    for (int m = 0; m < M; ++m)
      (first ? Vec::zero() : Vec::load_first(out[p] + m * out_stride, lanes[p]))
          .store(totals[p] + m * kPanelRows);
  for (int64_t g = 0; g < x.groups; g += kBatch) {
    multiply_batch<Panels>(x, g, scratch);
    for (int p = 0; p < Panels; ++p) {
      Vec total[M];
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) total[m] = Vec::load(totals[p] + m * kPanelRows);
      const int64_t count = std::min(kBatch, x.groups - g);
      for (int64_t i = 0; i < count; ++i)
        add_group<M>(scratch.dots[p][i], x.weights[p].scale[g + i], x.act_scale + g + i, total);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) total[m].store(totals[p] + m * kPanelRows);
    }
  }
  for (int p = 0; p < Panels; ++p)
    for (int m = 0; m < M; ++m)
      Vec::load(totals[p] + m * kPanelRows).store_first(out[p] + m * out_stride, lanes[p]);
}

using BlockFn = void (*)(const Operands&, bool, float* const (&)[2], int64_t, const int (&)[2],
                         Scratch&) noexcept;

template <int Panels, int... M>
constexpr std::array<BlockFn, sizeof...(M)> block_table(std::integer_sequence<int, M...>) {
  return {multiply_block<Panels, M + 1>...};
}

// kBlockFns<Panels>[m - 1] multiplies m tokens.
template <int Panels>
inline constexpr auto kBlockFns = block_table<Panels>(std::make_integer_sequence<int, kTileRows>{});

void configure(int64_t tokens) noexcept {
  TileConfig config;
  for (int i = 0; i < 2; ++i) {
    for (int panel = 0; panel < 2; ++panel) config.set(sum_tile(i, panel), tokens, kTileRowBytes);
    config.set(act_tile(i), tokens, kInt4Group);
    config.set(weight_tile(i), kGroupRows, kTileRowBytes);
  }
  config.load();
}

// A chunk of the columns of some panels, and the tokens of a pass.
struct Chunk {
  int64_t first_group, groups;
  int64_t first_token, num_tokens;
};

template <int Panels>
void multiply_panels(const GemmArgs& args, int64_t panel, const Chunk& chunk, Scratch& scratch) noexcept {
  const int64_t panel_bytes = format::panel_bytes(format::WeightFormat::kInt4G32, args.shape.in_features);
  const std::byte* block = args.weight + panel * panel_bytes + chunk.first_group * kBlockBytes;
  // After the last panels come the next columns of the first ones.
  const std::byte* next =
      panel + Panels < args.panel_end
          ? block + Panels * panel_bytes
          : args.weight + args.panel_begin * panel_bytes + (chunk.first_group + chunk.groups) * kBlockBytes;
  float* out[2] = {};
  int lanes[2] = {};
  for (int p = 0; p < Panels; ++p) {
    unpack(block + p * panel_bytes, next + p * panel_bytes, chunk.groups, scratch.weights[p]);
    out[p] = args.out + chunk.first_token * args.out_stride + (panel + p - args.panel_begin) * kPanelRows;
    lanes[p] = valid_rows(args, panel + p);
  }
  for (int64_t m = 0, configured = 0; m < chunk.num_tokens; m += kTileRows) {
    const int64_t tokens = std::min(kTileRows, chunk.num_tokens - m), i = m / kTileRows;
    if (tokens != configured) configure(tokens);
    configured = tokens;
    const Operands x{scratch.acts.q[i][0][0], scratch.acts.scale[i][0], scratch.weights, chunk.groups};
    kBlockFns<Panels>[static_cast<size_t>(tokens - 1)](x, chunk.first_group == 0, out, args.out_stride, lanes,
                                                       scratch);
    for (int p = 0; p < Panels; ++p) out[p] += kTileRows * args.out_stride;
  }
}

void multiply_pass(const GemmArgs& args, int64_t first_token, int64_t num_tokens, Scratch& scratch) noexcept {
  const int64_t all_groups = args.shape.in_features / kInt4Group;
  for (int64_t first = 0; first < all_groups; first += kChunkGroups) {
    const Chunk chunk{first, std::min(kChunkGroups, all_groups - first), first_token, num_tokens};
    copy_acts(args, first_token, num_tokens, first, chunk.groups, scratch.acts);
    int64_t panel = args.panel_begin;
    for (; panel + 2 <= args.panel_end; panel += 2) multiply_panels<2>(args, panel, chunk, scratch);
    if (panel < args.panel_end) multiply_panels<1>(args, panel, chunk, scratch);
  }
}

// Has the same bits.
const Kernel& avx512_cell() noexcept {
  static const Kernel& cell = cell_of(avx512_vnni_grouped_cells(), format::WeightFormat::kInt4G32);
  return cell;
}

const char* reject(const format::Shape& shape) noexcept { return avx512_cell().reject(shape); }

void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, std::byte* row) noexcept {
  avx512_cell().quantize(x, first, count, in_features, row);
}

void gemm(const GemmArgs& args) noexcept {
  if (args.num_tokens < kFewTokens) return avx512_cell().gemm(args);
  const TileRelease release;
  Scratch scratch;
  for (int64_t m = 0; m < args.num_tokens; m += kTokensPerPass)
    multiply_pass(args, m, std::min(kTokensPerPass, args.num_tokens - m), scratch);
}

}  // namespace
}  // namespace amx

const Kernel kAmxInt4G32 = {"amx.int4_g32",
                            cpu::kAvx512Tier | cpu::kAvx512Vnni | cpu::kAmxTile | cpu::kAmxInt8,
                            format::WeightFormat::kInt4G32,
                            ActFormat::kInt8G32,
                            amx::reject,
                            amx::quantize,
                            amx::silu_mul,
                            amx::gemm};

}  // namespace proa::gemm

#pragma GCC pop_options
