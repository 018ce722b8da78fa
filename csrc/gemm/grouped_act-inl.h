// The loops over panels and tokens of the cells of grouped formats, written once. Include inside an ISA's
// target region and namespace, after
//   template <class F> constexpr int kTokens                     the most tokens of one multiply_panel
//   void quantize_group(const float* x, int8_t* q, float* scale, int32_t (&halves)[2])   one group; the sums
//                                                                          of q of columns 0 .. 15, 16 .. 31
//   template <class F, int M> multiply_panel                     multiplies one panel with M tokens

template <class F>
void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, std::byte* row) noexcept {
  const QuantizedRowWriter dst = quantized_row_writer(row, in_features);
  for (int64_t k = first; k < first + count; k += format::kGroup) {
    int32_t halves[2];
    quantize_group(x + k - first, dst.q + k, dst.scale + k / format::kGroup, halves);
    write_sums<F>(dst.scale[k / format::kGroup], halves, k / format::kGroup, dst.sums);
  }
}

using PanelFn = void (*)(const std::byte*, int64_t, const QuantizedRow*, float*, int64_t, int) noexcept;

template <class F, int... M>
constexpr std::array<PanelFn, sizeof...(M)> panel_table(std::integer_sequence<int, M...>) {
  return {multiply_panel<F, M + 1>...};
}

// Tokens whose rows stay in the L2 cache while the panels pass by.
template <class F>
int64_t tokens_per_pass(int64_t in_features) noexcept {
  constexpr int64_t kPassBytes = 384 * 1024;
  const int64_t row_bytes = quantized_row_bytes(in_features, format::GroupedLayout<F>::kHalves);
  const int64_t tokens = kPassBytes / row_bytes / kTokens<F> * kTokens<F>;
  return tokens < kTokens<F> ? kTokens<F> : tokens;
}

template <class F>
void multiply_tokens(const GemmArgs& args, int64_t panel, int64_t first, int64_t end) noexcept {
  static constexpr auto kPanelFns = panel_table<F>(std::make_integer_sequence<int, kTokens<F>>{});
  const int64_t in = args.shape.in_features;
  const std::byte* weight =
      args.weight + panel * (format::ceil_div(format::GroupedLayout<F>::panel_bytes(in), 64) * 64);
  const int lanes = valid_rows(args, panel);
  float* out = args.out + (panel - args.panel_begin) * format::kPanelRows;
  for (int64_t m = first; m < end; m += kTokens<F>) {
    QuantizedRow x[kTokens<F>];
    const int64_t count = end - m < kTokens<F> ? end - m : kTokens<F>;
    for (int64_t i = 0; i < count; ++i) x[i] = quantized_row(args.x.row(m + i), in);
    kPanelFns[static_cast<size_t>(count - 1)](weight, in, x, out + m * args.out_stride, args.out_stride,
                                              lanes);
  }
}

template <class F>
void gemm(const GemmArgs& args) noexcept {
  const int64_t step = tokens_per_pass<F>(args.shape.in_features);
  for (int64_t first = 0; first < args.num_tokens; first += step) {
    const int64_t end = args.num_tokens - first < step ? args.num_tokens : first + step;
    for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel)
      multiply_tokens<F>(args, panel, first, end);
  }
}
