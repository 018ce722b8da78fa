// What bf16 tiles compute for one token, on vectors: the same bits, without unpacked weights on their way
// through memory. Include after split_act-inl.h, which says what a Weight has.
//
// Per 32 columns and term: the even and the odd columns are summed apart, from 0, by fused multiply-adds in
// the order of k; both sums are added, then that to the total; subnormals are read and written as 0.

constexpr int kStreams = 4;  // panels side by side
constexpr int64_t kStreamAhead = 2048;

// Subnormals count as 0 while it lives. Memory only passes between what runs inside and outside of it.
class FlushSubnormals {
 public:
  FlushSubnormals() noexcept { set(before_ | 0x8040u); }
  ~FlushSubnormals() { set(before_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static void set(uint32_t csr) noexcept { __asm__ volatile("ldmxcsr %0" : : "m"(csr) : "memory"); }
  static uint32_t get() noexcept {
    uint32_t csr;
    __asm__ volatile("stmxcsr %0" : "=m"(csr) : : "memory");
    return csr;
  }
  uint32_t before_ = get();
};

// Panels first, first + panel_bytes, ... of a weight, and the token.
struct Streams {
  const std::byte* first;
  int64_t panel_bytes, in_features;
  const std::byte* row;
};

// The floats of both halves of 16 pairs.
inline void split_pairs(__m512i pairs, __m512& first, __m512& second) noexcept {
  first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)));
}

// The 32 numbers of a term as floats: even columns, then odd ones.
inline void load_term(const std::byte* term, float (&x)[kSplitColumns]) noexcept {
  __m512 even, odd;
  split_pairs(_mm512_loadu_si512(term), even, odd);
  _mm512_storeu_ps(x, even);
  _mm512_storeu_ps(x + kSplitColumns / 2, odd);
}

// Adds a step of 32 columns, of which `columns` are there, to the total of each of P panels.
template <class Weight, int P>
inline void add_step(const Streams& w, int64_t step, int64_t columns, int64_t ahead,
                     Vec (&total)[P]) noexcept {
  constexpr int kTerms = Weight::kTerms;
  float x[kTerms][kSplitColumns];
  for (int t = 0; t < kTerms; ++t) load_term(w.row + (step * kTerms + t) * kSplitTermBytes, x[t]);
  Vec even[P * kTerms], odd[P * kTerms];
#pragma GCC unroll 8
  for (int i = 0; i < P * kTerms; ++i) even[i] = odd[i] = Vec::zero();
#pragma GCC unroll 8
  for (int64_t k = 0; k < kSplitColumns; k += 4)
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      const std::byte* panel = w.first + p * w.panel_bytes;
      constexpr int64_t kBytes = Weight::kStepBytes / (kSplitColumns / 4);
#pragma GCC unroll 2
      for (int64_t byte = 0; byte < kBytes; byte += 64)
        _mm_prefetch(
            reinterpret_cast<const char*>(panel + Weight::offset(step) + ahead + k / 4 * kBytes + byte),
            _MM_HINT_T0);
      const auto pairs = Weight::load(panel, step, k, columns);
      Vec weights[4];
      split_pairs(pairs.first, weights[0].v, weights[1].v);
      split_pairs(pairs.second, weights[2].v, weights[3].v);
#pragma GCC unroll 4
      for (int t = 0; t < kTerms; ++t) {
        const float* at = x[t] + k / 2;
        Vec &e = even[p * kTerms + t], &o = odd[p * kTerms + t];
        e = Vec::fma(weights[2], Vec::set1(at[1]), Vec::fma(weights[0], Vec::set1(at[0]), e));
        o = Vec::fma(weights[3], Vec::set1(at[17]), Vec::fma(weights[1], Vec::set1(at[16]), o));
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < P * kTerms; ++i)
    total[i / kTerms].v = _mm512_add_ps(total[i / kTerms].v, _mm512_add_ps(even[i].v, odd[i].v));
}

// Columns whose sums are kept before their scales are applied.
constexpr int64_t kSpanBlocks = 32;

template <int P>
using Sums = float[kSpanBlocks][P][kPanelRows];

// The products of the given steps, kScaled: the sums of each 128 columns, otherwise added to sums[0]. A call
// of its own, so that nothing of it is moved out of FlushSubnormals.
template <class Weight, int P>
__attribute__((noinline)) void sum_span(const Streams& w, const Steps& steps, Sums<P>& sums) noexcept {
  const int64_t end = steps.first + steps.count, whole = w.in_features / kSplitColumns;
  Vec total[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) total[p] = kBlockScaled<Weight> ? Vec::zero() : Vec::load(sums[0][p]);
  for (int64_t step = steps.first; step < end; ++step) {
    // Near the end of a panel the next lines of its stream are those of the panel P further on.
    const bool near_end = Weight::offset(step) + kStreamAhead >= w.panel_bytes;
    const int64_t ahead = kStreamAhead + (near_end ? (P - 1) * w.panel_bytes : 0);
    if (step < whole)
      add_step<Weight, P>(w, step, kSplitColumns, ahead, total);
    else
      add_step<Weight, P>(w, step, w.in_features - step * kSplitColumns, ahead, total);
    if (!kBlockScaled<Weight> || ((step + 1) % kScaleSteps != 0 && step + 1 != end)) continue;
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
      total[p].store(sums[(step - steps.first) / kScaleSteps][p]);
      total[p] = Vec::zero();
    }
  }
#pragma GCC unroll 8
  for (int p = 0; !kBlockScaled<Weight> && p < P; ++p) total[p].store(sums[0][p]);
}

// Adds the sums of `count` times 128 columns, times their scales from `scales` on, to the totals. Not
// inlined, as sum_span.
template <int P>
__attribute__((noinline)) void add_scaled(const Sums<P>& sums, const float* const (&scales)[P], int64_t count,
                                          float (&totals)[P][kPanelRows]) noexcept {
  for (int p = 0; p < P; ++p) {
    Vec total = Vec::load(totals[p]);
    for (int64_t i = 0; i < count; ++i)
      total = Vec::fma(Vec::load(sums[i][p]), Vec::set1(scales[p][i]), total);
    total.store(totals[p]);
  }
}

template <class Weight, int P>
void one_token_panels(const GemmArgs& args, int64_t panel) noexcept {
  constexpr int64_t kSpan = kSpanBlocks * kScaleSteps;
  const int64_t in = args.shape.in_features, all = steps_of(in);
  const int64_t panel_bytes = format::panel_bytes(Weight::kFormat, in);
  const Streams w{args.weight + panel * panel_bytes, panel_bytes, in, args.x.row(0)};
  alignas(64) Sums<P> sums;
  alignas(64) float totals[P][kPanelRows] = {};
  std::memset(sums[0], 0, sizeof(sums[0]));
  for (int64_t step = 0; step < all; step += kSpan) {
    const Steps steps{step, std::min(kSpan, all - step)};
    {
      const FlushSubnormals flush;
      sum_span<Weight, P>(w, steps, sums);
    }
    if constexpr (kBlockScaled<Weight>) {
      const float* scales[P];
      for (int p = 0; p < P; ++p) scales[p] = fp8_scales(args, panel + p) + step / kScaleSteps;
      add_scaled<P>(sums, scales, (steps.count + kScaleSteps - 1) / kScaleSteps, totals);
    }
  }
  for (int p = 0; p < P; ++p) {
    Vec total = Vec::load(kBlockScaled<Weight> ? totals[p] : sums[0][p]);
    if constexpr (Weight::kScaling == Scaling::kPerRow)
      total = Vec::mul(total, Vec::load(Weight::row_scales(w.first + p * panel_bytes, in)));
    total.store_first(args.out + (panel + p - args.panel_begin) * kPanelRows, valid_rows(args, panel + p));
  }
}

template <class Weight>
void one_token(const GemmArgs& args) noexcept {
  int64_t panel = args.panel_begin;
  for (; panel + kStreams <= args.panel_end; panel += kStreams)
    one_token_panels<Weight, kStreams>(args, panel);
  for (; panel < args.panel_end; ++panel) one_token_panels<Weight, 1>(args, panel);
}
