// The loops over panels and tokens of the cells of grouped formats, written once. Include inside an ISA's
// target region and namespace, after
//   constexpr int kTokenCounts[]
//     the numbers of tokens of one multiply_panels, from 1 up; others are cut into these
//   constexpr int streams_of(int tokens)
//     the panels (1, 2 or 4) that so many tokens are multiplied with together: a core gets more from memory
//     with several streams
//   bool quantize_group(const float* x, float fine_above, int8_t* q, int8_t* high, float* scale,
//                       int32_t (&halves)[2])
//     one group, and whether it is fine; halves: the sums of v of columns 0 .. 15 and 16 .. 31
//   void sum_halves(const float* x, float (&halves)[2])
//     the sums of x of these columns, in the order of quantized_act.h
//   template <class F, int M, int P> multiply_panels
//     multiplies P panels with M tokens

template <class F>
void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, float fine_above,
              std::byte* row) noexcept {
  const QuantizedRowWriter dst = quantized_row_writer<F>(row, in_features);
  for (int64_t k = first; k < first + count; k += format::kGroup) {
    const int64_t g = k / format::kGroup;
    GroupSums sums;
    dst.fine[g] = quantize_group(x + k - first, fine_above, dst.q + k, dst.high + k, dst.scale + g, sums.v);
    if constexpr (F::kMinimum) sum_halves(x + k - first, sums.x);
    write_sums<F>(dst.scale[g], sums, g, in_features, dst.sums);
  }
}

using PanelsFn = void (*)(const Panels&, const QuantizedRow*, float*, int64_t) noexcept;

constexpr int64_t kMostTokens = kTokenCounts[std::size(kTokenCounts) - 1];

// For each of kTokenCounts: `kCount` panels, or as few as streams_of says.
template <class F, int kCount, size_t... I>
constexpr std::array<PanelsFn, sizeof...(I)> panels_table(std::index_sequence<I...>) {
  return {multiply_panels<F, kTokenCounts[I], std::min(kCount, streams_of(kTokenCounts[I]))>...};
}
template <class F, int kCount>
inline constexpr auto kPanelsFns =
    panels_table<F, kCount>(std::make_index_sequence<std::size(kTokenCounts)>{});

// The last of kTokenCounts that is at most `tokens`.
inline size_t count_index(int64_t tokens) noexcept {
  size_t i = std::size(kTokenCounts) - 1;
  while (kTokenCounts[i] > tokens) --i;
  return i;
}

// Tokens whose rows stay in the L2 cache while the panels pass by.
template <class F>
int64_t tokens_per_pass(int64_t in_features) noexcept {
  constexpr int64_t kPassBytes = 384 * 1024;
  const int64_t row_bytes = quantized_row_bytes(in_features, kActSums<F>);
  const int64_t tokens = kPassBytes / row_bytes / kMostTokens * kMostTokens;
  return tokens < kMostTokens ? kMostTokens : tokens;
}

// `count` panels (1, 2 or 4) from `panel` on with tokens [first, end).
template <class F>
void multiply_tokens(const GemmArgs& args, int64_t panel, int64_t count, int64_t first,
                     int64_t end) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t stride = format::ceil_div(format::GroupedLayout<F>::panel_bytes(in), 64) * 64;
  const Panels panels{args.weight + panel * stride, stride, in, valid_rows(args, panel + count - 1)};
  const auto& functions = count == 4 ? kPanelsFns<F, 4> : count == 2 ? kPanelsFns<F, 2> : kPanelsFns<F, 1>;
  float* out = args.out + (panel - args.panel_begin) * format::kPanelRows;
  while (first < end) {
    QuantizedRow x[kMostTokens];
    const size_t index = count_index(end - first);
    for (int i = 0; i < kTokenCounts[index]; ++i) x[i] = quantized_row<F>(args.x.row(first + i), in);
    functions[index](panels, x, out + first * args.out_stride, args.out_stride);
    first += kTokenCounts[index];
  }
}

template <class F>
void gemm(const GemmArgs& args) noexcept {
  const int64_t step = tokens_per_pass<F>(args.shape.in_features);
  // Only where all tokens are one call: others read a panel again from cache.
  const bool one_call =
      args.num_tokens <= kMostTokens && kTokenCounts[count_index(args.num_tokens)] == args.num_tokens;
  const int64_t streams = one_call ? streams_of(static_cast<int>(args.num_tokens)) : 1;
  for (int64_t first = 0; first < args.num_tokens; first += step) {
    const int64_t end = args.num_tokens - first < step ? args.num_tokens : first + step;
    int64_t panel = args.panel_begin;
    for (int64_t count = streams; count >= 1; count /= 2)
      for (; panel + count <= args.panel_end; panel += count)
        multiply_tokens<F>(args, panel, count, first, end);
  }
}
