// The loops over panels and tokens of the int8 cells, written once. Include inside an ISA's target region and
// namespace, after kTokens and `template <int M> multiply_panel`, which multiplies one panel with M tokens.

using PanelFn = void (*)(const std::byte*, int64_t, const Int16Row*, float*, int64_t, int) noexcept;

template <int... M>
constexpr std::array<PanelFn, sizeof...(M)> panel_table(std::integer_sequence<int, M...>) {
  return {multiply_panel<M + 1>...};
}

constexpr auto kPanelFns = panel_table(std::make_integer_sequence<int, kTokens>{});

// One panel meets all tokens before the next one does: it is in the L1 or L2 cache after the first of them.
void gemm(const GemmArgs& args) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t panel_bytes = format::panel_bytes(format::WeightFormat::kInt8G128, in);
  for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel) {
    float* out = args.out + (panel - args.panel_begin) * format::kPanelRows;
    for (int64_t m = 0; m < args.num_tokens; m += kTokens) {
      Int16Row x[kTokens];
      const int64_t count = args.num_tokens - m < kTokens ? args.num_tokens - m : kTokens;
      for (int64_t i = 0; i < count; ++i) x[i] = Int16Row(args.x.row(m + i), in);
      kPanelFns[static_cast<size_t>(count - 1)](args.weight + panel * panel_bytes, in, x,
                                                out + m * args.out_stride, args.out_stride,
                                                valid_rows(args, panel));
    }
  }
}
