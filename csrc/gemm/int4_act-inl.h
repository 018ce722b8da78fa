// The loops over panels and tokens of the int4 cells, written once. Include inside an ISA's target region and
// namespace, after kTokens, quantize_group and `template <int M> multiply_panel`, which multiplies one panel
// with M tokens.

void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, std::byte* row) noexcept {
  const QuantizedRowWriter dst = quantized_row_writer(row, in_features);
  for (int64_t k = first; k < first + count; k += format::kInt4Group)
    quantize_group(x + k - first, dst.q + k, dst.scale + k / format::kInt4Group,
                   dst.offset + k / format::kInt4Group);
}

using PanelFn = void (*)(const std::byte*, int64_t, const QuantizedRow*, float*, int64_t, int) noexcept;

template <int... M>
constexpr std::array<PanelFn, sizeof...(M)> panel_table(std::integer_sequence<int, M...>) {
  return {multiply_panel<M + 1>...};
}

constexpr auto kPanelFns = panel_table(std::make_integer_sequence<int, kTokens>{});

// Tokens whose rows stay in the L2 cache while the panels pass by.
int64_t tokens_per_pass(int64_t in_features) noexcept {
  constexpr int64_t kPassBytes = 384 * 1024;
  const int64_t tokens = kPassBytes / quantized_row_bytes(in_features) / kTokens * kTokens;
  return tokens < kTokens ? kTokens : tokens;
}

void multiply_tokens(const GemmArgs& args, int64_t panel, int64_t first, int64_t end) noexcept {
  const int64_t in = args.shape.in_features;
  const std::byte* weight = args.weight + panel * format::panel_bytes(format::WeightFormat::kInt4G32, in);
  const int lanes = valid_rows(args, panel);
  float* out = args.out + (panel - args.panel_begin) * format::kPanelRows;
  for (int64_t m = first; m < end; m += kTokens) {
    QuantizedRow x[kTokens];
    const int64_t count = end - m < kTokens ? end - m : kTokens;
    for (int64_t i = 0; i < count; ++i) x[i] = quantized_row(args.x.row(m + i), in);
    kPanelFns[static_cast<size_t>(count - 1)](weight, in / kInt4Group, x, out + m * args.out_stride,
                                              args.out_stride, lanes);
  }
}

void gemm(const GemmArgs& args) noexcept {
  const int64_t step = tokens_per_pass(args.shape.in_features);
  for (int64_t first = 0; first < args.num_tokens; first += step) {
    const int64_t end = args.num_tokens - first < step ? args.num_tokens : first + step;
    for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel)
      multiply_tokens(args, panel, first, end);
  }
}
