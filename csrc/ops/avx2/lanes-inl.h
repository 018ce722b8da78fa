// The 16-lane vector of ops/*-inl.h in AVX2: two halves. Included inside the target region of each avx2 cell.

constexpr int kQueryRows = 6;  // 6 rows x 2 halves of sums + 3 operands stay within 16 registers
constexpr int kVectors = 1;

struct F16 {
  __m256 low, high;

  static F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
};

inline __m256i iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline __m256i first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), iota()); }

inline F16 set1(float x) { return F16::set1(x); }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen_bf16(__m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline F16 load(const uint16_t* p) {  // bf16
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {widen_bf16(_mm_loadu_si128(halves)), widen_bf16(_mm_loadu_si128(halves + 1))};
}
// n in 0 .. 15: only n elements are read, the other lanes are 0.
inline F16 load_first(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
inline F16 load_first(const uint16_t* p, int n) {
  alignas(32) uint16_t padded[16] = {};
  for (int i = 0; i < n; ++i) padded[i] = p[i];
  return load(padded);
}
inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline void store_first(float* p, F16 a, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), a.low);
  _mm256_maskstore_ps(p + 8, first_lanes(n - 8), a.high);
}

inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
// Lanes below n (0 .. 16) of a, the others of b.
inline F16 first_or(F16 a, int n, F16 b) {
  return {_mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(first_lanes(n))),
          _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(first_lanes(n - 8)))};
}
// Lanes of `value` where x >= limit or x is NaN, 0 elsewhere.
inline F16 zero_below(F16 x, F16 limit, F16 value) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_NLT_UQ), value.low),
          _mm256_and_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_NLT_UQ), value.high)};
}
// 2^n for the integer n in the low mantissa bits of t = 1.5 * 2^23 + n.
inline __m256 power_of_two(__m256 t) {
  const __m256i shifted = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(0x3f800000)));
}
inline F16 power_of_two(F16 t) { return {power_of_two(t.low), power_of_two(t.high)}; }

inline float first_lane(F16 a) { return _mm256_cvtss_f32(a.low); }
// One fixed tree: lane i with i + 8, then i + 4, i + 2, i + 1.
inline float reduce_add(F16 a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float reduce_max(F16 a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Columns column .. column + 15 of 16 rows; column c goes to dst + c * stride, lane i from row i.
inline void transpose16(const float* const* rows, int64_t column, float* dst, int64_t stride) {
  for (int half = 0; half < 16; half += 8) {
    for (int c = 0; c < 16; c += 4) {
      __m256 r[4];  // r[i]: columns c .. c + 3 of rows half + i and half + i + 4
      for (int i = 0; i < 4; ++i) {
        const __m128 low = _mm_loadu_ps(rows[half + i] + column + c);
        r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(low),
                                    _mm_loadu_ps(rows[half + i + 4] + column + c), 1);
      }
      const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[0], r[1]));
      const __m256d b = _mm256_castps_pd(_mm256_unpacklo_ps(r[2], r[3]));
      const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r[0], r[1]));
      const __m256d e = _mm256_castps_pd(_mm256_unpackhi_ps(r[2], r[3]));
      float* out = dst + c * stride + half;
      _mm256_storeu_ps(out, _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)));
      _mm256_storeu_ps(out + stride, _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
      _mm256_storeu_ps(out + 2 * stride, _mm256_castpd_ps(_mm256_unpacklo_pd(d, e)));
      _mm256_storeu_ps(out + 3 * stride, _mm256_castpd_ps(_mm256_unpackhi_pd(d, e)));
    }
  }
}
