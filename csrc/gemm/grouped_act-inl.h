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
//   constexpr int kBlockTokens
//     more of them, multiplied with one panel where they are many (grouped_tokens.h)
//   template <class F, int M, int P, class Tokens> multiply_panels
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

template <class F>
using PanelsFn = void (*)(const Panels&, const TokenRows<F>&, float*, int64_t) noexcept;

constexpr int kMostRows = kTokenCounts[std::size(kTokenCounts) - 1];

// For each of kTokenCounts: `kCount` panels, or as few as streams_of says.
template <class F, int kCount, size_t... I>
constexpr std::array<PanelsFn<F>, sizeof...(I)> panels_table(std::index_sequence<I...>) {
  return {
      multiply_panels<F, kTokenCounts[I], std::min(kCount, streams_of(kTokenCounts[I])), TokenRows<F>>...};
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

template <class F>
Panels panels_at(const GemmArgs& args, int64_t panel, int64_t count) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t stride = format::ceil_div(format::GroupedLayout<F>::panel_bytes(in), 64) * 64;
  return {args.weight + panel * stride, stride, in, valid_rows(args, panel + count - 1)};
}

inline float* out_at(const GemmArgs& args, int64_t token, int64_t panel) noexcept {
  return args.out + token * args.out_stride + (panel - args.panel_begin) * format::kPanelRows;
}

// `count` panels (1, 2 or 4) from `panel` on with the tokens from `first` on.
template <class F>
void multiply_rows(const GemmArgs& args, int64_t panel, int64_t count, int64_t first) noexcept {
  const Panels panels = panels_at<F>(args, panel, count);
  const auto& functions = count == 4 ? kPanelsFns<F, 4> : count == 2 ? kPanelsFns<F, 2> : kPanelsFns<F, 1>;
  while (first < args.num_tokens) {
    QuantizedRow x[kMostRows];
    const size_t index = count_index(args.num_tokens - first);
    for (int i = 0; i < kTokenCounts[index]; ++i)
      x[i] = quantized_row<F>(args.x.row(first + i), args.shape.in_features);
    functions[index](panels, {x}, out_at(args, first, panel), args.out_stride);
    first += kTokenCounts[index];
  }
}

// Tokens in blocks of kBlockTokens, side by side. They stay in the L2 cache while the panels pass by.
template <class F>
class Blocks {
 public:
  using Block = TokenBlock<F, kBlockTokens>;

  // As many tokens from `first` on as there is room for.
  Blocks(const GemmArgs& args, int64_t first) noexcept : groups_(args.shape.in_features / format::kGroup) {
    count_ = std::min({(args.num_tokens - first) / kBlockTokens, kEntries / groups_, kMostBlocks});
    for (int64_t b = 0; b < count_; ++b) {
      for (int64_t m = 0; m < kBlockTokens; ++m)
        rows_[b][m] = quantized_row<F>(args.x.row(first + b * kBlockTokens + m), args.shape.in_features);
      Block::copy(rows_[b], groups_, entries_ + b * groups_);
    }
  }

  int64_t tokens() const noexcept { return count_ * kBlockTokens; }
  void multiply(const Panels& panels, float* out, int64_t out_stride) const noexcept {
    for (int64_t b = 0; b < count_; ++b, out += kBlockTokens * out_stride)
      multiply_panels<F, kBlockTokens, 1, Block>(panels, {entries_ + b * groups_, rows_[b]}, out, out_stride);
  }

 private:
  static constexpr int64_t kBytes = 640 * 1024, kMostBlocks = 32;
  static constexpr auto kEntries = kBytes / static_cast<int64_t>(sizeof(typename Block::Entry));

  int64_t groups_, count_;
  QuantizedRow rows_[kMostBlocks][kBlockTokens];
  typename Block::Entry entries_[kEntries];
};

// Panels that pay for bringing tokens together.
constexpr int64_t kPanelsPerBlock = 4;

// The tokens that fill blocks; returns how many they are.
template <class F>
int64_t multiply_blocks(const GemmArgs& args) noexcept {
  if (args.panel_end - args.panel_begin < kPanelsPerBlock) return 0;
  int64_t first = 0;
  while (args.num_tokens - first >= kBlockTokens) {
    const Blocks<F> blocks(args, first);
    if (blocks.tokens() == 0) break;
    for (int64_t panel = args.panel_begin; panel < args.panel_end; ++panel)
      blocks.multiply(panels_at<F>(args, panel, 1), out_at(args, first, panel), args.out_stride);
    first += blocks.tokens();
  }
  return first;
}

template <class F>
void gemm(const GemmArgs& args) noexcept {
  const int64_t first = multiply_blocks<F>(args), tokens = args.num_tokens - first;
  if (tokens == 0) return;
  // Only where all tokens are one call: others read a panel again from cache.
  const bool one_call = tokens <= kMostRows && kTokenCounts[count_index(tokens)] == tokens;
  int64_t panel = args.panel_begin;
  for (int64_t count = one_call ? streams_of(static_cast<int>(tokens)) : 1; count >= 1; count /= 2)
    for (; panel + count <= args.panel_end; panel += count) multiply_rows<F>(args, panel, count, first);
}
