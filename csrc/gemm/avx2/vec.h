// 16 float lanes = one panel column, in two registers. Include inside the avx2 target region and namespace.

struct Vec {
  __m256 lo, hi;

  static Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static Vec load_first(const float* p, int lanes) {
    if (lanes == 16) return load(p);
    return {_mm256_maskload_ps(p, mask(lanes)), _mm256_maskload_ps(p + 8, mask(lanes - 8))};
  }
  // 16 e8m0 scales: base::e8m0_to_f32.
  static Vec load_e8m0(const std::byte* p) { return {load8_e8m0(p), load8_e8m0(p + 8)}; }
  static __m256 load8_e8m0(const std::byte* p) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m256i power = _mm256_max_epu32(_mm256_slli_epi32(bytes, 23), _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(255));
    return _mm256_castsi256_ps(_mm256_or_si256(power, _mm256_and_si256(nan, _mm256_set1_epi32(0x00400000))));
  }
  void store(float* p) const {
    _mm256_storeu_ps(p, lo);
    _mm256_storeu_ps(p + 8, hi);
  }
  void store_first(float* p, int lanes) const {
    if (lanes == 16) return store(p);
    _mm256_maskstore_ps(p, mask(lanes), lo);
    _mm256_maskstore_ps(p + 8, mask(lanes - 8), hi);
  }
  // All ones in the first `lanes` of 8 lanes; none when negative.
  static __m256i mask(int lanes) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
};
