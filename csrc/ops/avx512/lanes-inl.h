// The 16-lane vector of ops/*-inl.h in AVX-512. Included inside the target region and namespace of each
// avx512 cell.

constexpr int kQueryRows = 6;  // 6 rows x 4 vectors of sums + 4 operands stay within 32 registers
constexpr int kVectors = 4;

struct F16 {
  __m512 v;

  static F16 set1(float x) { return {_mm512_set1_ps(x)}; }
};

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline F16 set1(float x) { return F16::set1(x); }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load(const uint16_t* p) {  // bf16
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// n in 0 .. 15: only n elements are read, the other lanes are 0.
inline F16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline F16 load_first(const uint16_t* p, int n) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline void store_first(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// Lanes below n (0 .. 16) of a, the others of b.
inline F16 first_or(F16 a, int n, F16 b) { return {_mm512_mask_blend_ps(first_lanes(n), b.v, a.v)}; }
// Lanes of `value` where x >= limit or x is NaN, 0 elsewhere.
inline F16 zero_below(F16 x, F16 limit, F16 value) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), value.v)};
}
// 2^n for the integer n in the low mantissa bits of t = 1.5 * 2^23 + n.
inline F16 power_of_two(F16 t) {
  const __m512i shifted = _mm512_slli_epi32(_mm512_castps_si512(t.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3f800000)))};
}

inline float first_lane(F16 a) { return _mm512_cvtss_f32(a.v); }
// One fixed tree: lane i with i + 8, then i + 4, i + 2, i + 1.
inline float reduce_add(F16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float reduce_max(F16 a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Columns column .. column + 15 of 16 rows; column c goes to dst + c * stride, lane i from row i. Quarter
// rows are put together by the loads, so that only shuffles inside 128-bit lanes are left.
inline void transpose16(const float* const* rows, int64_t column, float* dst, int64_t stride) {
  __m512 r[4][4];  // r[c][i]: columns 4c .. 4c + 3 of rows i, i + 4, i + 8, i + 12
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // four row pointers at a time: sixteen would not stay in registers
    const float* const row[4] = {rows[i] + column, rows[i + 4] + column, rows[i + 8] + column,
                                 rows[i + 12] + column};
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const auto quarter = [&](int part) { return _mm_loadu_ps(row[part] + 4 * c); };
      const __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(quarter(0)), quarter(1), 1);
      const __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(quarter(2)), quarter(3), 1);
      r[c][i] = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[c][0], r[c][1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpacklo_ps(r[c][2], r[c][3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[c][0], r[c][1]));
    const __m512d e = _mm512_castps_pd(_mm512_unpackhi_ps(r[c][2], r[c][3]));
    float* out = dst + 4 * c * stride;
    _mm512_storeu_ps(out, _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)));
    _mm512_storeu_ps(out + stride, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    _mm512_storeu_ps(out + 2 * stride, _mm512_castpd_ps(_mm512_unpacklo_pd(d, e)));
    _mm512_storeu_ps(out + 3 * stride, _mm512_castpd_ps(_mm512_unpackhi_pd(d, e)));
  }
}
