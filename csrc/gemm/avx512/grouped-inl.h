// What the cells of grouped formats with 512-bit registers share. Include inside an ISA's target region and
// namespace, after Vec and beside the definition of `dot_quads`.

#include "gemm/avx512/grouped_codes-inl.h"

using format::kGroup;

constexpr int streams_of(int tokens) noexcept { return tokens == 1 ? 4 : tokens <= 4 ? 2 : 1; }
constexpr int64_t kPrefetchBytes = 4096;

// `dot` plus, for each of 16 rows, the u8 quads first .. first + count - 1 times the int8 quads at q.
template <class F>
inline __m512i dot_quads(__m512i dot, const __m512i (&quads)[8], int first, int count,
                         const int8_t* q) noexcept;

// Of each 8 bytes: the even ones, then the odd ones.
inline void store_plane(__m512i a, __m512i b, int8_t* dst) noexcept {
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm256_shuffle_epi8(bytes, order));
}

bool quantize_group(const float* x, float fine_above, int8_t* q, int8_t* high, float* scale,
                    int32_t (&halves)[2]) noexcept {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  // As integers, so that a NaN wins over every number.
  const __m512i sign_off = _mm512_set1_epi32(0x7fffffff);
  const __m512i magnitude = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), sign_off),
                                             _mm512_and_si512(_mm512_castps_si512(b), sign_off));
  const auto absmax = std::bit_cast<float>(_mm512_reduce_max_epu32(magnitude));
  const bool fine = absmax > fine_above;
  const float limit = fine ? kTwoPlanes : kOnePlane, d = absmax / limit;
  const __mmask16 nonzero = d == 0.0f ? 0 : 0xffff;
  const __m512 divisor = _mm512_set1_ps(d), least = _mm512_set1_ps(-limit), most = _mm512_set1_ps(limit);
  const __m512 ra = _mm512_min_ps(most, _mm512_max_ps(_mm512_maskz_div_ps(nonzero, a, divisor), least));
  const __m512 rb = _mm512_min_ps(most, _mm512_max_ps(_mm512_maskz_div_ps(nonzero, b, divisor), least));
  __m512i ia = _mm512_cvtps_epi32(ra), ib = _mm512_cvtps_epi32(rb);
  *scale = d;
  halves[0] = _mm512_reduce_add_epi32(ia);
  halves[1] = _mm512_reduce_add_epi32(ib);
  if (fine) {
    const __m512i half = _mm512_set1_epi32(4);
    const __m512i ha = _mm512_srai_epi32(_mm512_add_epi32(ia, half), kHighShift);
    const __m512i hb = _mm512_srai_epi32(_mm512_add_epi32(ib, half), kHighShift);
    store_plane(ha, hb, high);
    ia = _mm512_sub_epi32(ia, _mm512_slli_epi32(ha, kHighShift));
    ib = _mm512_sub_epi32(ib, _mm512_slli_epi32(hb, kHighShift));
  }
  store_plane(ia, ib, q);
  return fine;
}

inline float sum_16(__m512 v) noexcept {
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

inline void sum_halves(const float* x, float (&halves)[2]) noexcept {
  for (int h = 0; h < 2; ++h) halves[h] = sum_16(_mm512_loadu_ps(x + 16 * h));
}

// Group `i` of a super-block, group x of the tokens: what its columns add to the totals.
template <class F, int M, class Tokens>
inline void multiply_group(const __m512i (&quads)[8], const SuperScales<F>& scales, int64_t i,
                           const typename Tokens::Group& x, Vec (&total)[M]) noexcept {
  constexpr int kHalves = format::GroupedLayout<F>::kHalves, kQuads = 8 / kHalves;
  __m512 scale[kHalves], minimum[kHalves];
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    scale[h] = scales.scale(i * kGroup + h * 16);
    if constexpr (F::kMinimum) minimum[h] = scales.minimum(i * kGroup + h * 16);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
      const __m512i start = F::kMinimum ? _mm512_setzero_si512() : _mm512_set1_epi32(x.offset(m, h));
      __m512i dot = dot_quads<F>(start, quads, kQuads * h, kQuads, x.q(m));
      if (x.fine(m)) {
        const __m512i high = dot_quads<F>(_mm512_setzero_si512(), quads, kQuads * h, kQuads, x.high(m));
        dot = _mm512_add_epi32(dot, _mm512_slli_epi32(high, kHighShift));
      }
      const __m512 factor = _mm512_mul_ps(scale[h], _mm512_set1_ps(x.scale(m)));
      total[m].v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), factor, total[m].v);
      if constexpr (F::kMinimum) {
        total[m].v = _mm512_fmadd_ps(minimum[h], _mm512_set1_ps(x.sum(m, h)), total[m].v);
        total[m].v = _mm512_fmadd_ps(scale[h], _mm512_set1_ps(x.rest(m, h)), total[m].v);
      }
    }
  }
}

template <class F, int M, int P, class Tokens>
void multiply_panels(const Panels& panels, const Tokens& x, float* out, int64_t out_stride) noexcept {
  using Layout = format::GroupedLayout<F>;
  const int64_t all_groups = panels.in_features / kGroup;
  Vec total[P][M];
#pragma GCC unroll 16
  for (int i = 0; i < P * M; ++i) total[i / M][i % M] = Vec::zero();
  for (int64_t g = 0, at = 0; g < all_groups; g += Layout::kGroups) {
    const int64_t groups =
        Layout::kGroups == 1 || all_groups - g >= Layout::kGroups ? Layout::kGroups : all_groups - g;
    const std::byte* super = panels.first + at;
    const std::byte* ahead = super + panels.ahead(at, kPrefetchBytes / P, P);
    SuperScales<F> scales[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) scales[p] = SuperScales<F>(super + p * panels.stride, groups);
    for (int64_t i = 0; i < groups; ++i) {
      // Opaque: the compiler would keep pointers into the rows of every token, more than there are registers.
      int64_t group = g + i;
      asm("" : "+r"(group));
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        prefetch_group<F>(ahead + p * panels.stride, i, groups);
        __m512i quads[8];
        load_quads<F>(super + p * panels.stride + i * Layout::kGroupBytes, quads);
        multiply_group<F, M, Tokens>(quads, scales[p], i, x.group(group), total[p]);
      }
    }
    at += Layout::super_bytes(groups);
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const std::byte* factors =
        panels.first + p * panels.stride + Layout::row_scale_offset(panels.in_features);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      Vec result = total[p][m];
      if constexpr (F::kRowScale)
        result = Vec::mul(result, Vec::load(reinterpret_cast<const float*>(factors)));
      result.store_first(out + m * out_stride + p * format::kPanelRows, p == P - 1 ? panels.last_lanes : 16);
    }
  }
}

#include "gemm/grouped_act-inl.h"
