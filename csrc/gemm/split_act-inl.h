// The loops of the cells that multiply bf16 tiles, written once. Include inside an AMX target region and
// namespace. A Weight type has kFormat, kColumnBytes, kScaled and unpack_line, which turns the 64 /
// kColumnBytes columns of a 64-byte line into rows of a weight tile: 16 pairs of bf16, one pair of columns
// for each output row.
//
// Every output goes through the same instructions for every number of tokens: for each 32 columns one tile
// product per term of the activations, in that order. kScaled (fp8): the products of 128 columns are summed
// from 0 and the sum, times its scale, is added to the total.

using format::kPanelRows;

constexpr int64_t kTokensPerPass = 144;
constexpr int64_t kBlocksPerPass = kTokensPerPass / kTileRows;
// Columns are taken in chunks of steps of 32, so that the unpacked weights of two panels stay in the L1 cache
// and the activations of all tokens of a pass in the L2 cache.
constexpr int64_t kChunkSteps = 8;
constexpr int64_t kScaleSteps = format::kFp8Block / kSplitColumns;
// For one block of tokens weights are unpacked step by step, so many ahead of the products: memory is read
// all the time, and tiles are loaded some time after they were written, when that is fast.
constexpr int64_t kLeadSteps = 2;
constexpr int64_t kRingSteps = 4;
constexpr int64_t kPrefetchBytes = 4096;

// Two blocks of 16 tokens times two panels: four products for four tiles loaded.
constexpr int sum_tile(int block, int panel) { return 2 * block + panel; }
constexpr int act_tile(int block) { return 4 + block; }
constexpr int weight_tile(int panel) { return 6 + panel; }

void split(const float* x, int64_t first, int64_t count, int64_t, std::byte* row) noexcept {
  const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
  std::byte* dst = row + first / kSplitColumns * kSplitStepBytes;
  for (int64_t k = 0; k < count; k += kSplitColumns) {
    const int64_t left = std::min(kSplitColumns, count - k);
    const auto mask = static_cast<uint32_t>((uint64_t{1} << left) - 1);
    __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), x + k);
    __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), x + k + kSplitColumns / 2);
    for (int64_t term = 0; term < kSplitTerms; ++term, dst += kSplitTermBytes) {
      const auto bits = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
      _mm512_storeu_si512(dst, bits);
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

// Where the tiles of a chunk of activations stand, in bytes: first + i * block + s * step + t * term for
// token block i, step s and term t, with rows `stride` apart.
struct ActTiles {
  const std::byte* first;
  int64_t block, step, term, stride;
};

struct Scratch {
  alignas(64) std::byte acts[kBlocksPerPass * kChunkSteps][kSplitTerms][kTileBytes];
  alignas(64) std::byte weights[2][kChunkSteps][kTileBytes];
  alignas(64) float sums[2][4][kTileRows * kPanelRows];
  // Totals of a last panel with fewer than 16 rows: tiles are whole.
  alignas(64) float ragged[kTokensPerPass * kPanelRows];
};

// Columns in steps, and how many of them make a chunk.
constexpr int64_t steps_of(int64_t columns) noexcept { return (columns + kSplitColumns - 1) / kSplitColumns; }
constexpr int64_t chunk_columns(int64_t num_tokens) noexcept {
  return kSplitColumns * (num_tokens <= kTileRows ? kBlocksPerPass * kChunkSteps : kChunkSteps);
}

// Rows of the same distance are read where they are, others are brought together.
ActTiles act_tiles(const ActRows& rows, int64_t first_token, int64_t num_tokens, int64_t first_step,
                   int64_t steps, Scratch& scratch) noexcept {
  const int64_t offset = first_step * kSplitStepBytes;
  if (rows.index == nullptr || num_tokens == 1)
    return {rows.row(first_token) + offset, kTileRows * rows.stride_bytes, kSplitStepBytes, kSplitTermBytes,
            rows.stride_bytes};
  const int64_t block_bytes = steps * kSplitTerms * kTileBytes;
  for (int64_t m = 0; m < num_tokens; ++m) {
    const std::byte* src = rows.row(first_token + m) + offset;
    std::byte* dst = scratch.acts[0][0] + m / kTileRows * block_bytes + m % kTileRows * kTileRowBytes;
    for (int64_t line = 0; line < steps * kSplitTerms; ++line)
      _mm512_store_si512(dst + line * kTileBytes, _mm512_loadu_si512(src + line * kTileRowBytes));
  }
  return {scratch.acts[0][0], block_bytes, kSplitTerms * kTileBytes, kTileBytes, kTileRowBytes};
}

// Unpacks `columns` columns, padded with zeros to whole tiles, and requests as many at `next`.
template <class Weight>
void unpack(const std::byte* line, const std::byte* next, int64_t columns, std::byte* tiles) noexcept {
  constexpr int64_t kPerLine = 64 / Weight::kColumnBytes;
  constexpr int64_t kLineTileBytes = kPerLine / 2 * kTileRowBytes;
  const std::byte* const end = tiles + steps_of(columns) * kTileBytes;
  for (; columns >= kPerLine; columns -= kPerLine, line += 64, next += 64, tiles += kLineTileBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
    Weight::unpack_line(_mm512_loadu_si512(line), tiles);
  }
  if (columns > 0) {
    const uint64_t mask = (uint64_t{1} << columns * Weight::kColumnBytes) - 1;
    Weight::unpack_line(_mm512_maskz_loadu_epi8(mask, line), tiles);
    tiles += kLineTileBytes;
  }
  if (tiles < end) std::memset(tiles, 0, static_cast<size_t>(end - tiles));
}

// What is multiplied: a chunk of some panels with the tokens of some blocks.
struct Product {
  const std::byte* acts;  // of the first block
  ActTiles layout;
  int64_t steps;
  bool first;         // of the chunks: out holds nothing yet
  float* out[2];      // of each panel
  int64_t stride[2];  // in floats
  const float* scales[2];
  int64_t rows[2];  // of each block
};

// Sums that await their scale. They are added after the next products have begun: memory that a tile store
// wrote can be read only some time after the store.
struct Pending {
  float (*buffers)[4][kTileRows * kPanelRows];  // Scratch::sums, used in turn
  int buffer = 0;
  int blocks = 0, panels = 0;  // 0: nothing is pending
  bool first = false;
  float scale[2] = {};
  Product product = {};

  void add() noexcept {
    for (int b = 0; b < blocks; ++b)
      for (int p = 0; p < panels; ++p) add_one(b, p);
    blocks = 0;
  }
  void add_one(int block, int panel) const noexcept {
    const float* sum = buffers[buffer][sum_tile(block, panel)];
    const int64_t stride = product.stride[panel];
    float* out = product.out[panel] + block * kTileRows * stride;
    const Vec factor = Vec::set1(scale[panel]);
    for (int64_t m = 0; m < product.rows[block]; ++m, sum += kPanelRows, out += stride)
      Vec::fma(Vec::load(sum), factor, first ? Vec::zero() : Vec::load(out)).store(out);
  }
};

// Where the totals of block B and panel P stand, and how far their rows are apart, in bytes.
template <int B, int P>
inline float* place(const Product& p) noexcept {
  return p.out[P] + B * kTileRows * p.stride[P];
}
template <int P>
inline int64_t place_stride(const Product& p) noexcept {
  return p.stride[P] * static_cast<int64_t>(sizeof(float));
}

// What is done with the sum of block B and panel P; `sums` is where StoreSum puts it.
template <int B, int P>
struct Zero {
  static void run(const Product&, float (*)[kTileRows * kPanelRows]) noexcept { tile_zero<sum_tile(B, P)>(); }
};

template <int B, int P>
struct LoadTotal {
  static void run(const Product& p, float (*)[kTileRows * kPanelRows]) noexcept {
    tile_load<sum_tile(B, P)>(place<B, P>(p), place_stride<P>(p));
  }
};

template <int B, int P>
struct StoreTotal {
  static void run(const Product& p, float (*)[kTileRows * kPanelRows]) noexcept {
    tile_store<sum_tile(B, P)>(place<B, P>(p), place_stride<P>(p));
  }
};

template <int B, int P>
struct StoreSum {
  static void run(const Product&, float (*sums)[kTileRows * kPanelRows]) noexcept {
    tile_store<sum_tile(B, P)>(sums[sum_tile(B, P)], kTileRowBytes);
  }
};

template <int B, int P>
struct AddProduct {
  static void run(const Product&, float (*)[kTileRows * kPanelRows]) noexcept {
    tile_dot_bf16<sum_tile(B, P), act_tile(B), weight_tile(P)>();
  }
};

template <int Blocks, int Panels, template <int, int> class Action>
inline void each_sum(const Product& p, float (*sums)[kTileRows * kPanelRows] = nullptr) noexcept {
  Action<0, 0>::run(p, sums);
  if constexpr (Panels > 1) Action<0, 1>::run(p, sums);
  if constexpr (Blocks > 1) Action<1, 0>::run(p, sums);
  if constexpr (Blocks > 1 && Panels > 1) Action<1, 1>::run(p, sums);
}

// 32 columns. `weights` is the tile of the first panel, that of the second one stands a Scratch row further.
template <int Blocks, int Panels>
inline void multiply_step(const Product& p, const std::byte* acts, const std::byte* weights) noexcept {
  tile_load<weight_tile(0)>(weights, kTileRowBytes);
  if constexpr (Panels > 1) tile_load<weight_tile(1)>(weights + kChunkSteps * kTileBytes, kTileRowBytes);
#pragma GCC unroll 4
  for (int64_t term = 0; term < kSplitTerms; ++term, acts += p.layout.term) {
    tile_load<act_tile(0)>(acts, p.layout.stride);
    if constexpr (Blocks > 1) tile_load<act_tile(1)>(acts + p.layout.block, p.layout.stride);
    each_sum<Blocks, Panels, AddProduct>(p);
  }
}

// Before the first step of a scaled block, or of the chunk.
template <class Weight, int Blocks, int Panels>
inline void begin_sums(const Product& p) noexcept {
  if (Weight::kScaled || p.first)
    each_sum<Blocks, Panels, Zero>(p);
  else
    each_sum<Blocks, Panels, LoadTotal>(p);
}

// After the last one. Scaled: `block` is the number of the scale within the chunk.
template <class Weight, int Blocks, int Panels>
inline void end_sums(const Product& p, int64_t block, Pending& pending) noexcept {
  if constexpr (!Weight::kScaled) {
    each_sum<Blocks, Panels, StoreTotal>(p);
    return;
  }
  pending.add();
  pending.buffer ^= 1;
  each_sum<Blocks, Panels, StoreSum>(p, pending.buffers[pending.buffer]);
  pending.product = p;
  pending.blocks = Blocks;
  pending.panels = Panels;
  pending.first = p.first && block == 0;
  for (int i = 0; i < Panels; ++i) pending.scale[i] = p.scales[i][block];
}

// Steps after which sums are stored.
template <class Weight>
constexpr int64_t sum_steps(const Product& p) noexcept {
  return Weight::kScaled ? kScaleSteps : p.steps;
}

// The chunk with unpacked panels.
template <class Weight, int Blocks, int Panels>
void multiply_blocks(const Product& p, const std::byte* weights, Pending& pending) noexcept {
  const int64_t span = sum_steps<Weight>(p);
  const std::byte* acts = p.acts;
  for (int64_t begin = 0; begin < p.steps; begin += span) {
    begin_sums<Weight, Blocks, Panels>(p);
    for (int64_t s = begin; s < std::min(begin + span, p.steps); ++s, acts += p.layout.step)
      multiply_step<Blocks, Panels>(p, acts, weights + s * kTileBytes);
    end_sums<Weight, Blocks, Panels>(p, begin / span, pending);
  }
}

void configure(const Product& p) noexcept {
  TileConfig config;
  for (int block = 0; block < 2; ++block) {
    config.set(act_tile(block), p.rows[block], kTileRowBytes);
    for (int panel = 0; panel < 2; ++panel) config.set(sum_tile(block, panel), p.rows[block], kTileRowBytes);
  }
  for (int panel = 0; panel < 2; ++panel) config.set(weight_tile(panel), kTileRows, kTileRowBytes);
  config.load();
}

// The packed columns of some panels.
struct Columns {
  const std::byte* first;  // of the first panel
  const std::byte* next;   // what is read after them
  int64_t panel_bytes;
  int64_t count;
};

// All tokens of the pass: the weights of the chunk are unpacked once.
template <class Weight, int Panels>
void multiply_tokens(Product p, const Columns& columns, int64_t num_tokens, Scratch& scratch,
                     Pending& pending) noexcept {
  for (int i = 0; i < Panels; ++i)
    unpack<Weight>(columns.first + i * columns.panel_bytes, columns.next + i * columns.panel_bytes,
                   columns.count, scratch.weights[i][0]);
  const std::byte* weights = scratch.weights[0][0];
  p.rows[0] = p.rows[1] = kTileRows;
  int64_t m = 0;
  if (num_tokens >= 2 * kTileRows) configure(p);
  for (; m + 2 * kTileRows <= num_tokens; m += 2 * kTileRows) {
    multiply_blocks<Weight, 2, Panels>(p, weights, pending);
    p.acts += 2 * p.layout.block;
    for (int panel = 0; panel < Panels; ++panel) p.out[panel] += 2 * kTileRows * p.stride[panel];
  }
  if (m == num_tokens) return;
  p.rows[0] = std::min(kTileRows, num_tokens - m);
  p.rows[1] = num_tokens - m - p.rows[0];
  const bool two = p.rows[1] > 0;
  if (!two) p.rows[1] = kTileRows;  // unused, but a tile may not have 0 rows
  configure(p);
  if (two)
    multiply_blocks<Weight, 2, Panels>(p, weights, pending);
  else
    multiply_blocks<Weight, 1, Panels>(p, weights, pending);
}

// One block of tokens: each step of the weights is unpacked kLeadSteps before it is multiplied.
template <class Weight, int Panels>
void multiply_stream(Product p, const Columns& columns, int64_t num_tokens, Scratch& scratch,
                     Pending& pending) noexcept {
  constexpr int64_t kStepBytes = kSplitColumns * Weight::kColumnBytes;
  const int64_t bytes = columns.count * Weight::kColumnBytes;
  const auto unpack_step = [&](int64_t s) noexcept {
    const int64_t at = s * kStepBytes, ahead = at + kPrefetchBytes;
    const std::byte* prefetch = ahead < bytes ? columns.first + ahead : columns.next + (ahead - bytes);
    for (int i = 0; i < Panels; ++i)
      unpack<Weight>(columns.first + at + i * columns.panel_bytes, prefetch + i * columns.panel_bytes,
                     std::min(kSplitColumns, columns.count - s * kSplitColumns),
                     scratch.weights[i][s % kRingSteps]);
  };
  p.rows[0] = num_tokens;
  p.rows[1] = kTileRows;
  configure(p);
  for (int64_t s = 0; s < std::min(kLeadSteps, p.steps); ++s) unpack_step(s);
  const int64_t span = sum_steps<Weight>(p);
  const std::byte* acts = p.acts;
  for (int64_t begin = 0; begin < p.steps; begin += span) {
    begin_sums<Weight, 1, Panels>(p);
    for (int64_t s = begin; s < std::min(begin + span, p.steps); ++s, acts += p.layout.step) {
      if (s + kLeadSteps < p.steps) unpack_step(s + kLeadSteps);
      multiply_step<1, Panels>(p, acts, scratch.weights[0][s % kRingSteps]);
    }
    end_sums<Weight, 1, Panels>(p, begin / span, pending);
  }
}

// Columns k .. k + columns - 1 of the panels `panel` .. panel + Panels - 1.
template <class Weight, int Panels>
void multiply_chunk(const GemmArgs& args, const ActTiles& layout, int64_t panel, int64_t k, int64_t columns,
                    int64_t first_token, int64_t num_tokens, Scratch& scratch, Pending& pending) noexcept {
  const int64_t panel_bytes = format::panel_bytes(Weight::kFormat, args.shape.in_features);
  const std::byte* first = args.weight + panel * panel_bytes + k * Weight::kColumnBytes;
  // What follows: the next panels, or the next columns of the first ones.
  const std::byte* next = panel + Panels < args.panel_end ? first + Panels * panel_bytes
                                                          : args.weight + args.panel_begin * panel_bytes +
                                                                (k + columns) * Weight::kColumnBytes;
  Product p{layout.first, layout, steps_of(columns), k == 0, {}, {}, {}, {}};
  for (int i = 0; i < Panels; ++i) {
    const bool whole = valid_rows(args, panel + i) == kPanelRows;
    p.stride[i] = whole ? args.out_stride : kPanelRows;
    p.out[i] = whole ? args.out + first_token * args.out_stride + (panel + i - args.panel_begin) * kPanelRows
                     : scratch.ragged;
    if (Weight::kScaled) p.scales[i] = fp8_scales(args, panel + i) + k / format::kFp8Block;
  }
  const Columns packed{first, next, panel_bytes, columns};
  if (num_tokens <= kTileRows)
    multiply_stream<Weight, Panels>(p, packed, num_tokens, scratch, pending);
  else
    multiply_tokens<Weight, Panels>(p, packed, num_tokens, scratch, pending);
}

template <class Weight>
void multiply_pass(const GemmArgs& args, int64_t first_token, int64_t num_tokens, Scratch& scratch) noexcept {
  Pending pending{scratch.sums};
  const int64_t chunk = chunk_columns(num_tokens);
  for (int64_t k = 0; k < args.shape.in_features; k += chunk) {
    const int64_t columns = std::min(chunk, args.shape.in_features - k);
    const ActTiles layout =
        act_tiles(args.x, first_token, num_tokens, k / kSplitColumns, steps_of(columns), scratch);
    int64_t panel = args.panel_begin;
    for (; panel + 2 <= args.panel_end; panel += 2)
      multiply_chunk<Weight, 2>(args, layout, panel, k, columns, first_token, num_tokens, scratch, pending);
    if (panel < args.panel_end)
      multiply_chunk<Weight, 1>(args, layout, panel, k, columns, first_token, num_tokens, scratch, pending);
  }
  pending.add();
  const int64_t last = args.panel_end - 1;
  const int lanes = valid_rows(args, last);
  if (lanes == kPanelRows) return;
  float* out = args.out + first_token * args.out_stride + (last - args.panel_begin) * kPanelRows;
  for (int64_t m = 0; m < num_tokens; ++m)
    Vec::load(scratch.ragged + m * kPanelRows).store_first(out + m * args.out_stride, lanes);
}

template <class Weight>
void gemm(const GemmArgs& args) noexcept {
  const TileRelease release;
  Scratch scratch;
  for (int64_t m = 0; m < args.num_tokens; m += kTokensPerPass)
    multiply_pass<Weight>(args, m, std::min(kTokensPerPass, args.num_tokens - m), scratch);
}
