// The loops of the cells with f32 activations, written once. Include inside an ISA's target region and
// namespace, after Vec (16 lanes = one panel column) and with kPanels, kTokens and kStreams defined: the
// accumulators of kPanels x kTokens (one token: kStreams) must fit in registers.
//
// A Weight type says how the columns of a panel become floats:
//   kFormat, kScaling (gemm/panel.h)
//   kGroup    columns that are found together; kLoad of them are made floats at a time
//   offset    about where in a panel the bytes of column k stand, for prefetching
//   row_scales, for kPerRow
//   group     the group of columns k .. k + kGroup of a panel; its load(i, columns) gives columns
//             k + i * kLoad .. of it
// Weights without a structure of their own are Lines<T> of a T with kFormat, kScaling, kColumnBytes and
// load_line, which makes floats of the 64 / kColumnBytes columns of a 64-byte line. Panels are padded to
// whole lines; the last group may hold fewer columns.
//
// Every output has one accumulator fed in the order of k. kPerBlock: the 128 columns of a block are summed
// from 0 and the sum, times its scale, is added to the total. kPerRow: the total is multiplied at the end.

inline constexpr int64_t kBlockColumns = 128;
// Of x copied next to each other per pass: 96 KB with the unpacked weights, so both stay in the L2 cache.
inline constexpr int64_t kMaxTokensPerPass = 144;

template <class T>
struct Lines {
  static constexpr auto kFormat = T::kFormat;
  static constexpr Scaling kScaling = T::kScaling;
  static constexpr int kGroup = 64 / T::kColumnBytes;
  static constexpr int kLoad = kGroup;

  struct Group {
    const std::byte* line;
    void load(int, Vec (&columns)[kLoad]) const { T::load_line(line, columns); }
  };
  static constexpr int64_t offset(int64_t k) { return k * T::kColumnBytes; }
  static Group group(const std::byte* panel, int64_t k, int64_t) { return {panel + offset(k)}; }
  static const float* row_scales(const std::byte* panel, int64_t in_features) {
    return T::row_scales(panel, in_features);
  }
};

template <class Weight>
inline void prefetch_group(const std::byte* at) noexcept {
  constexpr int64_t kLines = (Weight::offset(Weight::kGroup) + 63) / 64;
#pragma GCC unroll 16
  for (int64_t line = 0; line < kLines; ++line)
    _mm_prefetch(reinterpret_cast<const char*>(at + 64 * line), _MM_HINT_T0);
}

// ---- one token: bound by memory, P panels in flight, weights converted on the fly ----

// Lines of the P streams are requested this far ahead.
inline constexpr int64_t kPrefetchBytes = 2048;

// Columns [k, end) of P panels.
template <class Weight, int P>
inline void one_token_block(const GemmArgs& args, const std::byte* panel, int64_t panel_bytes, int64_t ahead,
                            int64_t k, int64_t end, Vec (&sum)[P]) noexcept {
  constexpr int kGroup = Weight::kGroup, kLoad = Weight::kLoad;
  const int64_t in = args.shape.in_features;
  const auto* x = reinterpret_cast<const float*>(args.x.row(0));
  typename Weight::Group group[P];
  for (; k + kGroup <= end; k += kGroup) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      prefetch_group<Weight>(panel + p * panel_bytes + Weight::offset(k) + ahead);
      group[p] = Weight::group(panel + p * panel_bytes, k, in);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kGroup / kLoad; ++i) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        Vec weights[kLoad];
        group[p].load(i, weights);
#pragma GCC unroll 8
        for (int u = 0; u < kLoad; ++u)
          sum[p] = Vec::fma(weights[u], Vec::set1(x[k + i * kLoad + u]), sum[p]);
      }
    }
  }
  for (int p = 0; k < end && p < P; ++p) {
    Vec weights[kLoad];
    Weight::group(panel + p * panel_bytes, k, in).load(0, weights);
    for (int64_t u = 0; u < end - k; ++u) sum[p] = Vec::fma(weights[u], Vec::set1(x[k + u]), sum[p]);
  }
}

template <class Weight, int P>
inline void one_token_panels(const GemmArgs& args, int64_t panel) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t panel_bytes = format::panel_bytes(Weight::kFormat, in);
  const std::byte* const first = args.weight + panel * panel_bytes;
  Vec total[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) total[p] = Vec::zero();
  for (int64_t k = 0, block = 0; k < in; k += kBlockColumns, ++block) {
    const int64_t end = in - k < kBlockColumns ? in : k + kBlockColumns;
    // Near the end of a panel the next lines of this stream are those of the panel P further on.
    const int64_t ahead = Weight::offset(k) + kPrefetchBytes < panel_bytes
                              ? kPrefetchBytes
                              : kPrefetchBytes + (P - 1) * panel_bytes;
    if constexpr (Weight::kScaling == Scaling::kPerBlock) {
      Vec sum[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sum[p] = Vec::zero();
      one_token_block<Weight, P>(args, first, panel_bytes, ahead, k, end, sum);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p)
        total[p] = Vec::fma(sum[p], Vec::set1(fp8_scales(args, panel + p)[block]), total[p]);
    } else {
      one_token_block<Weight, P>(args, first, panel_bytes, ahead, k, end, total);
    }
  }
  for (int p = 0; p < P; ++p) {
    if constexpr (Weight::kScaling == Scaling::kPerRow)
      total[p] = Vec::mul(total[p], Vec::load(Weight::row_scales(first + p * panel_bytes, in)));
    total[p].store_first(args.out + (panel + p - args.panel_begin) * format::kPanelRows,
                         valid_rows(args, panel + p));
  }
}

template <class Weight>
void one_token(const GemmArgs& args) noexcept {
  int64_t panel = args.panel_begin;
  for (; panel + kStreams <= args.panel_end; panel += kStreams)
    one_token_panels<Weight, kStreams>(args, panel);
  for (; panel < args.panel_end; ++panel) one_token_panels<Weight, 1>(args, panel);
}

// ---- several tokens: 128 columns at a time, weights unpacked once per pass, totals kept in `out` between
// blocks ----

struct Tile {
  const float* weights;  // [P][128][16]
  const float* x;        // [tokens][128]
  int64_t columns;
  const float* block_scales[2];  // per panel; nullptr: none
  const float* row_scales[2];    // the same, and in the last block only
  bool first;                    // of the blocks: out holds nothing yet
  float* out;
  int64_t out_stride;
  int lanes;  // of the last panel
};

template <int P, int M>
void multiply_tile(const Tile& tile) noexcept {
  Vec sum[M][P];
  const bool scaled = tile.block_scales[0] != nullptr;
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      sum[m][p] = Vec::zero();
      if (!scaled && !tile.first)
        sum[m][p] = Vec::load_first(tile.out + m * tile.out_stride + p * format::kPanelRows,
                                    p == P - 1 ? tile.lanes : 16);
    }
  }
  const float* w = tile.weights;
  const float* x = tile.x;
  for (int64_t k = 0; k < tile.columns; ++k, ++x, w += format::kPanelRows) {
    Vec wk[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) wk[p] = Vec::load(w + p * kBlockColumns * format::kPanelRows);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec xk = Vec::set1(x[m * kBlockColumns]);
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) sum[m][p] = Vec::fma(wk[p], xk, sum[m][p]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      const int lanes = p == P - 1 ? tile.lanes : 16;
      float* out = tile.out + m * tile.out_stride + p * format::kPanelRows;
      if (scaled)
        sum[m][p] = Vec::fma(sum[m][p], Vec::set1(*tile.block_scales[p]),
                             tile.first ? Vec::zero() : Vec::load_first(out, lanes));
      if (tile.row_scales[0] != nullptr) sum[m][p] = Vec::mul(sum[m][p], Vec::load(tile.row_scales[p]));
      sum[m][p].store_first(out, lanes);
    }
  }
}

using TileFn = void (*)(const Tile&) noexcept;

template <int P, int... M>
constexpr std::array<TileFn, sizeof...(M)> tile_table(std::integer_sequence<int, M...>) {
  return {multiply_tile<P, M + 1>...};
}

// kTiles<P>[m - 1] multiplies m tokens.
template <int P>
inline constexpr auto kTiles = tile_table<P>(std::make_integer_sequence<int, kTokens>{});

template <int P>
void multiply_tokens(Tile tile, int64_t num_tokens) noexcept {
  for (int64_t m = 0; m < num_tokens; m += kTokens) {
    const int64_t count = num_tokens - m < kTokens ? num_tokens - m : kTokens;
    kTiles<P>[static_cast<size_t>(count - 1)](tile);
    tile.x += kTokens * kBlockColumns;
    tile.out += kTokens * tile.out_stride;
  }
}

// Unpacks the groups of columns [k, k + columns) and requests what is unpacked next: `next` on.
template <class Weight>
inline void unpack_block(const std::byte* panel, int64_t in_features, int64_t k, int64_t columns,
                         const std::byte* next, float* weights) noexcept {
  constexpr int kGroup = Weight::kGroup, kLoad = Weight::kLoad;
  for (int64_t c = 0; c < columns; c += kGroup) {
    prefetch_group<Weight>(next + Weight::offset(c));
    const auto group = Weight::group(panel, k + c, in_features);
#pragma GCC unroll 8
    for (int i = 0; i < kGroup / kLoad; ++i) {
      Vec values[kLoad];
      group.load(i, values);
#pragma GCC unroll 8
      for (int u = 0; u < kLoad; ++u) values[u].store(weights + (c + i * kLoad + u) * format::kPanelRows);
    }
  }
}

inline void copy_activations(const ActRows& rows, int64_t first, int64_t count, int64_t k, int64_t columns,
                             float* x) noexcept {
  for (int64_t m = 0; m < count; ++m)
    std::memcpy(x + m * kBlockColumns, reinterpret_cast<const float*>(rows.row(first + m)) + k,
                static_cast<size_t>(columns) * sizeof(float));
}

// One block of P panels from `panel` on, for all tokens of the pass.
template <class Weight, int P>
inline void multiply_panels(const GemmArgs& args, int64_t panel, int64_t k, Tile& tile, float* weights,
                            int64_t num_tokens) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t panel_bytes = format::panel_bytes(Weight::kFormat, in);
  const std::byte* const first = args.weight + panel * panel_bytes;
  // What follows: the next panels of this block, or the first ones of the next block.
  const std::byte* next = panel + P < args.panel_end ? first + P * panel_bytes + Weight::offset(k)
                                                     : args.weight + args.panel_begin * panel_bytes +
                                                           Weight::offset(k + tile.columns);
  const bool last = k + tile.columns == in;
  for (int p = 0; p < P; ++p) {
    unpack_block<Weight>(first + p * panel_bytes, in, k, tile.columns, next + p * panel_bytes,
                         weights + p * kBlockColumns * format::kPanelRows);
    if constexpr (Weight::kScaling == Scaling::kPerBlock)
      tile.block_scales[p] = fp8_scales(args, panel + p) + k / kBlockColumns;
    if constexpr (Weight::kScaling == Scaling::kPerRow)
      tile.row_scales[p] = last ? Weight::row_scales(first + p * panel_bytes, in) : nullptr;
  }
  tile.lanes = valid_rows(args, panel + P - 1);
  multiply_tokens<P>(tile, num_tokens);
}

template <class Weight>
void multiply_pass(const GemmArgs& args, int64_t first_token, int64_t num_tokens) noexcept {
  alignas(64) float weights[kPanels * kBlockColumns * format::kPanelRows];
  alignas(64) float x[kMaxTokensPerPass * kBlockColumns];
  const int64_t in = args.shape.in_features;
  for (int64_t k = 0; k < in; k += kBlockColumns) {
    Tile tile{weights,         x, in - k < kBlockColumns ? in - k : kBlockColumns, {}, {}, k == 0, nullptr,
              args.out_stride, 16};
    copy_activations(args.x, first_token, num_tokens, k, tile.columns, x);
    for (int64_t panel = args.panel_begin; panel < args.panel_end; panel += kPanels) {
      tile.out = args.out + first_token * args.out_stride + (panel - args.panel_begin) * format::kPanelRows;
      if (panel + kPanels <= args.panel_end)
        multiply_panels<Weight, kPanels>(args, panel, k, tile, weights, num_tokens);
      else
        multiply_panels<Weight, 1>(args, panel, k, tile, weights, num_tokens);
    }
  }
}

template <class Weight>
void gemm(const GemmArgs& args) noexcept {
  if (args.num_tokens == 1) return one_token<Weight>(args);
  for (int64_t m = 0; m < args.num_tokens; m += kMaxTokensPerPass)
    multiply_pass<Weight>(args, m,
                          args.num_tokens - m < kMaxTokensPerPass ? args.num_tokens - m : kMaxTokensPerPass);
}
