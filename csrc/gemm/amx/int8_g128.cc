#include "format/int8_g128.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "gemm/amx/tile.h"
#include "gemm/int16_act.h"
#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace amx {
namespace {

#include "gemm/avx512/vec.h"

using format::kPanelRows;
using format::int8_g128::kStepBytes;

// Fewer tokens are faster in the avx512 cell, which has the same bits.
constexpr int64_t kFewTokens = 5;
// Columns are taken in chunks of groups of 128: those of 16 tokens stay in the L1 cache while the panels pass
// by, the weights of all panels of a call in the L2 cache while the tokens do.
constexpr int64_t kChunkGroups = 4;
constexpr int64_t kChunkSteps = 2 * kChunkGroups;
constexpr int64_t kTokensPerPass = 256;
constexpr int64_t kBlocksPerPass = kTokensPerPass / kTileRows;

// A group's sums go to memory while those of the group before it are scaled.
constexpr int kHigh = 0, kLow = 1;
constexpr int sum_tile(int group, int plane) { return 2 * (group % 2) + plane; }
constexpr int act_tile(int plane) { return 4 + plane; }
constexpr int kWeightTile = 6;
constexpr int64_t kTileFloats = kTileRows * kPanelRows;

// A tiled block: as rows have them, the lines of 16 rows in turn, their scales [groups][16], and of each
// group whether one of them has a high plane.
struct BlockLayout {
  int64_t scales, fine;  // where they begin

  explicit constexpr BlockLayout(int64_t in_features) noexcept
      : scales(2 * int16_steps(in_features) * kTileBytes),
        fine(scales + int16_groups(in_features) * kTileRows * static_cast<int64_t>(sizeof(float))) {}
};

void pack(const std::byte* const* rows, int64_t count, int64_t in_features, std::byte* block) noexcept {
  const BlockLayout layout(in_features);
  const int64_t groups = int16_groups(in_features), lines = 2 * int16_steps(in_features);
  auto* scales = reinterpret_cast<float*>(block + layout.scales);
  auto* fine = reinterpret_cast<uint8_t*>(block + layout.fine);
  std::memset(fine, 0, static_cast<size_t>(groups));
  for (int64_t m = 0; m < count; ++m) {
    const Int16Row row(rows[m], in_features);
    for (int64_t line = 0; line < lines; ++line)
      _mm512_store_si512(block + line * kTileBytes + m * kTileRowBytes,
                         _mm512_loadu_si512(rows[m] + line * kTileRowBytes));
    for (int64_t g = 0; g < groups; ++g) {
      scales[g * kTileRows + m] = row.scale[g];
      fine[g] |= row.fine[g];
    }
  }
}

// Where the tiles of a chunk of activations stand, in bytes: first + i * block + s * step + p * plane for
// token block i, step s and plane p, with rows `stride` apart.
struct ActTiles {
  const std::byte* first;
  int64_t block, step, plane, stride;
  const float* scale;  // [blocks][kChunkGroups or all groups][kTileRows], so many bytes apart:
  int64_t scale_block;
  const uint8_t* fine;
  int64_t fine_block;
};

struct Scratch {
  alignas(64) std::byte acts[kBlocksPerPass * kChunkSteps][2][kTileBytes];
  alignas(64) float scale[kBlocksPerPass][kChunkGroups][kTileRows];
  uint8_t fine[kBlocksPerPass][kChunkGroups];   // whether a token of the block has a high plane
  alignas(64) int32_t sums[2][2][kTileFloats];  // of two groups, both planes
};

// Rows of the same distance are read where they are, others are brought together.
ActTiles act_tiles(const GemmArgs& args, int64_t first_token, int64_t num_tokens, int64_t first_group,
                   int64_t steps, Scratch& scratch) noexcept {
  const int64_t offset = 2 * first_group * kInt16StepBytes;
  const int64_t groups = (steps + 1) / 2;
  if (args.x.tiled) {
    const BlockLayout layout(args.shape.in_features);
    const std::byte* first = args.x.row(first_token);
    const int64_t block = kTileRows * args.x.stride_bytes;
    return {first + kTileRows * offset,
            block,
            2 * kTileBytes,
            kTileBytes,
            kTileRowBytes,
            reinterpret_cast<const float*>(first + layout.scales) + first_group * kTileRows,
            block,
            reinterpret_cast<const uint8_t*>(first + layout.fine) + first_group,
            block};
  }
  std::memset(scratch.fine, 0, sizeof scratch.fine);
  for (int64_t m = 0; m < num_tokens; ++m) {
    const Int16Row row(args.x.row(first_token + m), args.shape.in_features);
    for (int64_t g = 0; g < groups; ++g) {
      scratch.scale[m / kTileRows][g][m % kTileRows] = row.scale[first_group + g];
      scratch.fine[m / kTileRows][g] |= row.fine[first_group + g];
    }
  }
  ActTiles tiles{args.x.row(first_token) + offset,
                 kTileRows * args.x.stride_bytes,
                 kInt16StepBytes,
                 kInt16Step,
                 args.x.stride_bytes,
                 scratch.scale[0][0],
                 sizeof scratch.scale[0],
                 scratch.fine[0],
                 sizeof scratch.fine[0]};
  if (args.x.index == nullptr) return tiles;
  const int64_t block_bytes = steps * 2 * kTileBytes;
  for (int64_t m = 0; m < num_tokens; ++m) {
    const std::byte* src = args.x.row(first_token + m) + offset;
    std::byte* dst = scratch.acts[0][0] + m / kTileRows * block_bytes + m % kTileRows * kTileRowBytes;
    for (int64_t line = 0; line < 2 * steps; ++line)
      _mm512_store_si512(dst + line * kTileBytes, _mm512_loadu_si512(src + line * kTileRowBytes));
  }
  tiles.first = scratch.acts[0][0];
  tiles.block = block_bytes;
  tiles.step = 2 * kTileBytes;
  tiles.plane = kTileBytes;
  tiles.stride = kTileRowBytes;
  return tiles;
}

// One panel and one block of tokens.
struct Product {
  const std::byte* acts;
  const std::byte* weights;
  const float* act_scale;  // [kChunkGroups][kTileRows]
  const uint8_t* fine;     // [kChunkGroups]
  const std::byte* weight_scale;
  int64_t step, plane, stride;  // of ActTiles
  int64_t steps;
  const std::byte* ahead;  // weights of the next chunk, requested meanwhile:
  int64_t ahead_bytes;     // so many for each group
};

template <int Group>
inline void multiply_step(const Product& p, int64_t s, bool fine) noexcept {
  tile_load<kWeightTile>(p.weights + s * kStepBytes, kTileRowBytes);
  tile_load<act_tile(kLow)>(p.acts + s * p.step + p.plane, p.stride);
  tile_dot_int8<sum_tile(Group, kLow), act_tile(kLow), kWeightTile>();
  if (!fine) return;
  tile_load<act_tile(kHigh)>(p.acts + s * p.step, p.stride);
  tile_dot_int8<sum_tile(Group, kHigh), act_tile(kHigh), kWeightTile>();
}

// total[m] = fma(256 * high + low, weight scale * activation scale, total[m])
template <int M, bool kFine>
inline void add_group(const int32_t (&sums)[2][kTileFloats], __m256i weight_scale, const float* act_scale,
                      Vec (&total)[M]) noexcept {
  const Vec scale{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(weight_scale), 16))};
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    __m512i dot = _mm512_load_si512(sums[kLow] + kPanelRows * m);
    if constexpr (kFine)
      dot = _mm512_add_epi32(dot, _mm512_slli_epi32(_mm512_load_si512(sums[kHigh] + kPanelRows * m), 8));
    total[m] = Vec::fma({_mm512_cvtepi32_ps(dot)}, Vec::mul(scale, Vec::set1(act_scale[m])), total[m]);
  }
}

template <int M>
inline void add_group(const Product& p, int64_t group, const Scratch& scratch, Vec (&total)[M]) noexcept {
  const auto* scales = reinterpret_cast<const __m256i*>(p.weight_scale) + group;
  const __m256i scale = _mm256_loadu_si256(scales);
  const float* act_scale = p.act_scale + group * kTileRows;
  if (p.fine[group] != 0)
    add_group<M, true>(scratch.sums[group % 2], scale, act_scale, total);
  else
    add_group<M, false>(scratch.sums[group % 2], scale, act_scale, total);
}

// The products of a group, and the scaling of the one before it.
template <int M, int Group>
inline void multiply_group(const Product& p, int64_t group, Scratch& scratch, Vec (&total)[M]) noexcept {
  const bool fine = p.fine[group] != 0;
  tile_zero<sum_tile(Group, kLow)>();
  if (fine) tile_zero<sum_tile(Group, kHigh)>();
  multiply_step<Group>(p, 2 * group, fine);
  if (2 * group + 1 < p.steps) multiply_step<Group>(p, 2 * group + 1, fine);
  for (int64_t byte = 0; byte < p.ahead_bytes; byte += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p.ahead + group * p.ahead_bytes + byte), _MM_HINT_T1);
  if (group > 0) add_group<M>(p, group - 1, scratch, total);
  tile_store<sum_tile(Group, kLow)>(scratch.sums[Group][kLow], kTileRowBytes);
  if (fine) tile_store<sum_tile(Group, kHigh)>(scratch.sums[Group][kHigh], kTileRowBytes);
}

// The first chunk of columns starts the totals at `out`.
template <int M>
void multiply_block(const Product& p, bool first, float* out, int64_t out_stride, int lanes,
                    Scratch& scratch) noexcept {
  Vec total[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m] = first ? Vec::zero() : Vec::load_first(out + m * out_stride, lanes);
  const int64_t groups = (p.steps + 1) / 2;
  for (int64_t g = 0; g < groups; g += 2) {
    multiply_group<M, 0>(p, g, scratch, total);
    if (g + 1 < groups) multiply_group<M, 1>(p, g + 1, scratch, total);
  }
  add_group<M>(p, groups - 1, scratch, total);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m].store_first(out + m * out_stride, lanes);
}

using BlockFn = void (*)(const Product&, bool, float*, int64_t, int, Scratch&) noexcept;

template <int... M>
constexpr std::array<BlockFn, sizeof...(M)> block_table(std::integer_sequence<int, M...>) {
  return {multiply_block<M + 1>...};
}

// kBlockFns[m - 1] multiplies m tokens.
constexpr auto kBlockFns = block_table(std::make_integer_sequence<int, kTileRows>{});

void configure(int64_t tokens) noexcept {
  TileConfig config;
  for (int tile = 0; tile < kWeightTile; ++tile) config.set(tile, tokens, kTileRowBytes);
  config.set(kWeightTile, kTileRows, kTileRowBytes);
  config.load();
}

void multiply_chunk(const GemmArgs& args, int64_t first_group, int64_t first_token, int64_t num_tokens,
                    Scratch& scratch) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t panel_bytes = format::panel_bytes(format::WeightFormat::kInt8G128, in);
  const int64_t steps = std::min(kChunkSteps, int16_steps(in) - 2 * first_group);
  const ActTiles acts = act_tiles(args, first_token, num_tokens, first_group, steps, scratch);
  const int64_t groups = (steps + 1) / 2, blocks = (num_tokens + kTileRows - 1) / kTileRows;
  const int64_t next_steps = std::min(kChunkSteps, int16_steps(in) - 2 * first_group - steps);
  const int64_t ahead_bytes = (next_steps * kStepBytes / 64 + groups * blocks - 1) / (groups * blocks) * 64;
  for (int64_t m = 0, configured = 0; m < num_tokens; m += kTileRows) {
    const int64_t tokens = std::min(kTileRows, num_tokens - m), block = m / kTileRows;
    if (tokens != configured) configure(tokens);
    configured = tokens;
    for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
      const std::byte* weight = args.weight + panel * panel_bytes;
      const Product p{
          acts.first + block * acts.block,
          weight + 2 * first_group * kStepBytes,
          acts.scale + block * acts.scale_block / static_cast<int64_t>(sizeof(float)),
          acts.fine + block * acts.fine_block,
          weight + format::int8_g128::scales_offset(in) + first_group * format::int8_g128::kScaleBytes,
          acts.step,
          acts.plane,
          acts.stride,
          steps,
          weight + (2 * first_group + steps) * kStepBytes + block * groups * ahead_bytes,
          ahead_bytes};
      float* out = args.out + (first_token + m) * args.out_stride + (panel - args.panel_begin) * kPanelRows;
      kBlockFns[static_cast<size_t>(tokens - 1)](p, first_group == 0, out, args.out_stride,
                                                 valid_rows(args, panel), scratch);
    }
  }
}

void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, float fine_above,
              std::byte* row) noexcept {
  kAvx512Int8G128.quantize(x, first, count, in_features, fine_above, row);
}

void gemm(const GemmArgs& args) noexcept {
  if (args.num_tokens < kFewTokens && !args.x.tiled) return kAvx512Int8G128.gemm(args);
  const TileRelease release;
  Scratch scratch;
  for (int64_t m = 0; m < args.num_tokens; m += kTokensPerPass)
    for (int64_t g = 0; g < int16_groups(args.shape.in_features); g += kChunkGroups)
      multiply_chunk(args, g, m, std::min(kTokensPerPass, args.num_tokens - m), scratch);
}

}  // namespace
}  // namespace amx

const Kernel kAmxInt8G128 = {"amx.int8_g128",
                             cpu::kAmxTier | cpu::kAvx512Bw | cpu::kAvx512Vnni,
                             format::WeightFormat::kInt8G128,
                             ActFormat::kInt16G128,
                             format::int8_g128::reject,
                             amx::quantize,
                             amx::gemm,
                             amx::pack};

}  // namespace proa::gemm

#pragma GCC pop_options
