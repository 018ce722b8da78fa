// The loops of the cells that multiply bf16 tiles, written once. Include inside an AMX target region and
// namespace. A Weight type has
//   kFormat
//   kStepBytes, offset(step)      of 32 columns of a panel, which stand together
//   kInPlace                      these bytes are a weight tile as they stand: 16 rows of 16 pairs of bf16,
//                                 one pair of columns for each output row, zeros where there is no column
//   load(panel, step, k, columns)   the lines `first` and `second` of that tile that hold the columns k .. k
//   + 4
//                                 of a step, of which `columns` <= 32 are there
//   kOnVectors                    one token goes through split_one_token-inl.h
//   kScaling                      where its scales come in (gemm/panel.h)
// Split<Weight, Terms> is it with the number of terms of the activations it meets.
//
// Every output goes through the same instructions for every number of tokens: for each 32 columns one tile
// product per term of the activations, in that order.

using format::kPanelRows;

template <class Weight, int64_t Terms>
struct Split : Weight {
  static constexpr int64_t kTerms = Terms;
};

// kPerBlock: the products of 128 columns are summed from 0 and the sum, times its scale, is added to the
// total. kPerRow: each total is multiplied by the scale of its row at the end.
template <class Weight>
inline constexpr bool kBlockScaled = Weight::kScaling == Scaling::kPerBlock;

constexpr int64_t kTokensPerPass = 256;
constexpr int64_t kBlocksPerPass = kTokensPerPass / kTileRows;
constexpr int64_t kPanelsPerPass = 16;
// Columns are taken in chunks of steps of 32: those of two blocks of tokens, 32 KB, stay in the L1 cache
// while the panels pass it by; all activations, unpacked weights and totals of a pass stay in the L2 cache.
// Up to 64 tokens wait for weights, which come faster in small pieces.
constexpr int64_t kMaxChunkSteps = 16;
template <class Weight>
constexpr int64_t chunk_steps(int64_t num_tokens) noexcept {
  return std::min<int64_t>(num_tokens <= 64 ? 8 : kMaxChunkSteps, kMaxChunkSteps / Weight::kTerms);
}
constexpr int64_t kScaleSteps = format::kFp8Block / kSplitColumns;
// For one block of tokens weights are unpacked step by step, so many ahead of the products: memory is read
// all the time, and tiles are loaded some time after they were written, when that is fast.
constexpr int64_t kLeadSteps = 2;
constexpr int64_t kRingSteps = 4;
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kTileFloats = kTileRows * kPanelRows;

// Two blocks of 16 tokens times two panels: four products for four tiles loaded.
constexpr int sum_tile(int block, int panel) { return 2 * block + panel; }
constexpr int act_tile(int block) { return 4 + block; }
constexpr int weight_tile(int panel) { return 6 + panel; }

template <int64_t Terms>
void split(const float* x, int64_t first, int64_t count, int64_t, float, std::byte* row) noexcept {
  const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  std::byte* dst = row + first / kSplitColumns * Terms * kSplitTermBytes;
  for (int64_t k = 0; k < count; k += kSplitColumns) {
    const int64_t left = std::min(kSplitColumns, count - k);
    const auto mask = static_cast<uint32_t>((uint64_t{1} << left) - 1);
    __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x + k);
    __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + k + kSplitColumns / 2);
    for (int64_t term = 0; term < Terms; ++term, dst += kSplitTermBytes) {
      const auto bits = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
      _mm512_storeu_si512(dst, bits);
      if (term + 1 == Terms) continue;
      const auto rest = [&](__m512 value, __m256i rounded) {
        const __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
        const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(wide), infinity, _CMP_LT_OQ);
        return _mm512_maskz_sub_ps(finite, value, wide);
      };
      low = rest(low, _mm512_castsi512_si256(bits));
      high = rest(high, _mm512_extracti64x4_epi64(bits, 1));
    }
  }
}

template <int64_t Terms>
void pack(const std::byte* const* rows, int64_t count, int64_t in_features, std::byte* block) noexcept {
  const int64_t lines = (in_features + kSplitColumns - 1) / kSplitColumns * Terms;
  for (int64_t m = 0; m < count; ++m)
    for (int64_t line = 0; line < lines; ++line)
      _mm512_store_si512(block + split_block_offset(line, m),
                         _mm512_loadu_si512(rows[m] + line * kSplitTermBytes));
}

// Where the tiles of a chunk of activations stand, in bytes: first + i * block + s * step + t * term for
// token block i, step s and term t, with rows `stride` apart.
struct ActTiles {
  const std::byte* first;
  int64_t block, step, term, stride;
};

struct Scratch {
  alignas(64) std::byte acts[kBlocksPerPass * kMaxChunkSteps][kTileBytes];
  alignas(64) std::byte weights[kPanelsPerPass][kMaxChunkSteps][kTileBytes];
  alignas(64) float totals[kBlocksPerPass][kPanelsPerPass][kTileFloats];
  alignas(64) float sums[2][4][kTileFloats];
};

constexpr int64_t steps_of(int64_t columns) noexcept { return (columns + kSplitColumns - 1) / kSplitColumns; }

// Where the totals of one or two blocks and panels stand, in floats.
struct Place {
  float* first;
  int64_t block, panel, row;  // distances

  float* tile(int b, int p) const noexcept { return first + b * block + p * panel; }
  int64_t row_bytes() const noexcept { return row * static_cast<int64_t>(sizeof(float)); }
};

// The tokens and panels whose totals stand in Scratch.
struct Pass {
  const GemmArgs& args;
  int64_t first_token, num_tokens;
  int64_t first_panel, num_panels;

  int64_t blocks() const noexcept { return (num_tokens + kTileRows - 1) / kTileRows; }
  int64_t block_tokens(int64_t block) const noexcept {
    return std::min(kTileRows, num_tokens - block * kTileRows);
  }
  // Whether the last totals may go straight to the outputs: whole tiles, and no scale is left to apply.
  template <class Weight>
  bool stores_directly() const noexcept {
    return Weight::kScaling != Scaling::kPerRow &&
           (first_panel + num_panels) * kPanelRows <= args.shape.out_features;
  }
  Place out_of(int64_t block, int64_t panel) const noexcept {
    return {args.out + (first_token + block * kTileRows) * args.out_stride +
                (first_panel - args.panel_begin + panel) * kPanelRows,
            kTileRows * args.out_stride, kPanelRows, args.out_stride};
  }
};

// Steps [first, first + count) of all columns.
struct Steps {
  int64_t first, count;
};

// Rows of the same distance are read where they are, others are brought together.
template <int64_t Terms>
ActTiles act_tiles(const Pass& pass, const Steps& steps, Scratch& scratch) noexcept {
  const ActRows& rows = pass.args.x;
  const int64_t offset = steps.first * Terms * kSplitTermBytes;
  if (rows.tiled)
    return {rows.row(pass.first_token) + kTileRows * offset, kTileRows * rows.stride_bytes,
            Terms * kTileBytes, kTileBytes, kTileRowBytes};
  if (rows.index == nullptr || pass.num_tokens == 1)
    return {rows.row(pass.first_token) + offset, kTileRows * rows.stride_bytes, Terms * kSplitTermBytes,
            kSplitTermBytes, rows.stride_bytes};
  const int64_t block_bytes = steps.count * Terms * kTileBytes;
  for (int64_t m = 0; m < pass.num_tokens; ++m) {
    const std::byte* src = rows.row(pass.first_token + m) + offset;
    std::byte* dst = scratch.acts[0] + m / kTileRows * block_bytes + m % kTileRows * kTileRowBytes;
    for (int64_t line = 0; line < steps.count * Terms; ++line)
      _mm512_store_si512(dst + line * kTileBytes, _mm512_loadu_si512(src + line * kTileRowBytes));
  }
  return {scratch.acts[0], block_bytes, Terms * kTileBytes, kTileBytes, kTileRowBytes};
}

// Panel `panel` of a pass.
template <class Weight>
const std::byte* panel_of(const Pass& pass, int64_t panel) noexcept {
  return pass.args.weight +
         (pass.first_panel + panel) * format::panel_bytes(Weight::kFormat, pass.args.shape.in_features);
}

template <class Weight>
void unpack(const Pass& pass, int64_t panel, int64_t step, std::byte* tile) noexcept {
  if constexpr (!Weight::kInPlace)
    for (int64_t k = 0; k < kSplitColumns; k += 4, tile += 2 * kTileRowBytes) {
      const auto pairs =
          Weight::load(panel_of<Weight>(pass, panel), step, k,
                       std::min(kSplitColumns, pass.args.shape.in_features - step * kSplitColumns));
      _mm512_store_si512(tile, pairs.first);
      _mm512_store_si512(tile + kTileRowBytes, pairs.second);
    }
}

// An asm, as gcc takes a function of nothing but prefetches for one without effect.
inline void prefetch(const std::byte* first, int64_t bytes) noexcept {
  for (int64_t byte = 0; byte < bytes; byte += 64) __asm__ volatile("prefetcht0 %0" : : "m"(first[byte]));
}

// The weights of the next chunk, requested a few lines at each step.
struct Ahead {
  const std::byte* at;  // in the first panel
  int64_t panel_bytes;
  int64_t step_bytes;  // of each panel

  void request(int64_t panels) noexcept {
    for (int64_t i = 0; i < panels; ++i)
      for (int64_t byte = 0; byte < step_bytes; byte += 64)
        _mm_prefetch(reinterpret_cast<const char*>(at + i * panel_bytes + byte), _MM_HINT_T1);
    at += step_bytes;
  }
};

#include "gemm/split_product-inl.h"

// One block of tokens and the panels `panel` ..: the weights of each step are unpacked kLeadSteps before they
// are multiplied, or are tiles as they stand. `next` is what is read after them.
template <class Weight, int Panels>
void multiply_stream(const Pass& pass, const Product& p, const Steps& steps, int64_t panel,
                     const std::byte* next, Scratch& scratch, Pending& pending) noexcept {
  const int64_t panel_bytes = format::panel_bytes(Weight::kFormat, pass.args.shape.in_features);
  const std::byte* packed = panel_of<Weight>(pass, panel);
  const std::byte* end = packed + Weight::offset(steps.first + steps.count);
  const auto unpack_step = [&](int64_t s) noexcept {
    const std::byte* far = packed + Weight::offset(steps.first + s) + kPrefetchBytes;
    if (far >= end) far = next + (far - end);
    for (int i = 0; i < Panels; ++i) {
      prefetch(far + i * panel_bytes, Weight::kStepBytes);
      unpack<Weight>(pass, panel + i, steps.first + s, scratch.weights[i][s % kRingSteps]);
    }
  };
  for (int64_t s = 0; s < std::min(kLeadSteps, p.steps); ++s) unpack_step(s);
  const int64_t span = sum_steps<Weight>(p);
  const std::byte* acts = p.acts;
  for (int64_t begin = 0; begin < p.steps; begin += span) {
    begin_sums<Weight, 1, Panels>(p);
    for (int64_t s = begin; s < std::min(begin + span, p.steps); ++s, acts += p.layout.step) {
      if (s + kLeadSteps < p.steps) unpack_step(s + kLeadSteps);
      multiply_step<Weight::kTerms, 1, Panels>(
          p, acts, Weight::kInPlace ? p.weights + s * kTileBytes : scratch.weights[0][s % kRingSteps]);
    }
    end_sums<Weight, 1, Panels>(p, begin / span, pending);
  }
}

// Tiles for two blocks of so many tokens; the second may have none.
void configure(int64_t first, int64_t second) noexcept {
  const int64_t rows[2] = {first, second > 0 ? second : kTileRows};  // a tile may not have 0 rows
  TileConfig config;
  for (int block = 0; block < 2; ++block) {
    config.set(act_tile(block), rows[block], kTileRowBytes);
    for (int panel = 0; panel < 2; ++panel) config.set(sum_tile(block, panel), rows[block], kTileRowBytes);
  }
  for (int panel = 0; panel < 2; ++panel) config.set(weight_tile(panel), kTileRows, kTileRowBytes);
  config.load();
}

// The steps of token block `block` and of panel `panel` of the pass, and what follows each.
template <class Weight>
Product product_of(const Pass& pass, const Steps& steps, const ActTiles& layout, int64_t block, int64_t panel,
                   Scratch& scratch) noexcept {
  const int64_t panel_bytes = format::panel_bytes(Weight::kFormat, pass.args.shape.in_features);
  const std::byte* weights = Weight::kInPlace ? panel_of<Weight>(pass, panel) + Weight::offset(steps.first)
                                              : scratch.weights[panel][0];
  const Place totals{scratch.totals[block][panel], kPanelsPerPass * kTileFloats, kTileFloats, kPanelRows};
  const bool last = steps.first + steps.count == steps_of(pass.args.shape.in_features);
  Product p{layout.first + block * layout.block,
            layout,
            weights,
            Weight::kInPlace ? panel_bytes : kMaxChunkSteps * kTileBytes,
            steps.count,
            steps.first == 0,
            totals,
            last && pass.stores_directly<Weight>() ? pass.out_of(block, panel) : totals,
            {},
            {pass.block_tokens(block), pass.block_tokens(block + 1)}};
  if constexpr (kBlockScaled<Weight>)
    for (int64_t i = 0; i < std::min<int64_t>(2, pass.num_panels - panel); ++i)
      p.scales[i] = fp8_scales(pass.args, pass.first_panel + panel + i) + steps.first / kScaleSteps;
  return p;
}

// More tokens than one block, one chunk: its weights are unpacked once.
template <class Weight>
void multiply_chunk(const Pass& pass, const Steps& steps, Scratch& scratch, Pending& pending) noexcept {
  const int64_t in = pass.args.shape.in_features;
  const int64_t panel_bytes = format::panel_bytes(Weight::kFormat, in);
  if constexpr (!Weight::kInPlace)
    for (int64_t i = 0; i < pass.num_panels; ++i)
      for (int64_t s = 0; s < steps.count; ++s)
        unpack<Weight>(pass, i, steps.first + s, scratch.weights[i][s]);
  const ActTiles layout = act_tiles<Weight::kTerms>(pass, steps, scratch);
  // The next chunk is requested bit by bit by the blocks.
  const int64_t rounds = (pass.blocks() + 1) / 2 * steps.count;
  const int64_t left = steps_of(in) - steps.first - steps.count;
  const int64_t lines = std::min(left, steps.count) * Weight::kStepBytes / 64;
  const int64_t step_bytes = (lines + rounds - 1) / rounds * 64;
  for (int64_t block = 0; block < pass.blocks(); block += 2) {
    const bool two = block + 1 < pass.blocks();
    configure(pass.block_tokens(block), two ? pass.block_tokens(block + 1) : 0);
    for (int64_t panel = 0; panel < pass.num_panels; panel += 2) {
      const Product p = product_of<Weight>(pass, steps, layout, block, panel, scratch);
      const Ahead ahead{panel_of<Weight>(pass, panel) + Weight::offset(steps.first + steps.count) +
                            block / 2 * step_bytes * steps.count,
                        panel_bytes, step_bytes};
      const bool pair = panel + 1 < pass.num_panels;
      if (two && pair)
        multiply_blocks<Weight, 2, 2>(p, ahead, pending);
      else if (two)
        multiply_blocks<Weight, 2, 1>(p, ahead, pending);
      else if (pair)
        multiply_blocks<Weight, 1, 2>(p, ahead, pending);
      else
        multiply_blocks<Weight, 1, 1>(p, ahead, pending);
    }
  }
}

// One block of tokens, one chunk.
template <class Weight>
void multiply_few(const Pass& pass, const Steps& steps, Scratch& scratch, Pending& pending) noexcept {
  const ActTiles layout = act_tiles<Weight::kTerms>(pass, steps, scratch);
  configure(pass.num_tokens, 0);
  for (int64_t panel = 0; panel < pass.num_panels; panel += 2) {
    const Product p = product_of<Weight>(pass, steps, layout, 0, panel, scratch);
    // What follows: the next panels, or the next columns of the first ones.
    const bool more = panel + 2 < pass.num_panels;
    const std::byte* next = panel_of<Weight>(pass, more ? panel + 2 : 0) +
                            Weight::offset(more ? steps.first : steps.first + steps.count);
    if (panel + 1 < pass.num_panels)
      multiply_stream<Weight, 2>(pass, p, steps, panel, next, scratch, pending);
    else
      multiply_stream<Weight, 1>(pass, p, steps, panel, next, scratch, pending);
  }
}

template <class Weight>
void store_totals(const Pass& pass, const Scratch& scratch) noexcept {
  const GemmArgs& args = pass.args;
  for (int64_t m = 0; m < pass.num_tokens; ++m) {
    float* out = args.out + (pass.first_token + m) * args.out_stride +
                 (pass.first_panel - args.panel_begin) * kPanelRows;
    for (int64_t i = 0; i < pass.num_panels; ++i) {
      Vec total = Vec::load(scratch.totals[m / kTileRows][i] + m % kTileRows * kPanelRows);
      if constexpr (Weight::kScaling == Scaling::kPerRow)
        total =
            Vec::mul(total, Vec::load(Weight::row_scales(panel_of<Weight>(pass, i), args.shape.in_features)));
      total.store_first(out + i * kPanelRows, valid_rows(args, pass.first_panel + i));
    }
  }
}

template <class Weight>
void multiply_pass(const Pass& pass, Scratch& scratch) noexcept {
  Pending pending{scratch.sums};
  const bool few = pass.num_tokens <= kTileRows;
  const int64_t width =
      few ? kBlocksPerPass * kMaxChunkSteps / Weight::kTerms : chunk_steps<Weight>(pass.num_tokens);
  const int64_t all = steps_of(pass.args.shape.in_features);
  for (int64_t s = 0; s < all; s += width) {
    const Steps steps{s, std::min(width, all - s)};
    if (few)
      multiply_few<Weight>(pass, steps, scratch, pending);
    else
      multiply_chunk<Weight>(pass, steps, scratch, pending);
  }
  pending.add();
  if (!pass.stores_directly<Weight>()) store_totals<Weight>(pass, scratch);
}
