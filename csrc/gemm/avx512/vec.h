// 16 float lanes = one panel column. Include inside the avx512 target region and namespace.

struct Vec {
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec set1(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load_first(const float* p, int lanes) { return {_mm512_maskz_loadu_ps(mask(lanes), p)}; }
  // 16 e8m0 scales: base::e8m0_to_f32.
  static Vec load_e8m0(const std::byte* p) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m512i power = _mm512_max_epu32(_mm512_slli_epi32(bytes, 23), _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(255));
    return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(power, nan, _mm512_set1_epi32(0x7fc00000)))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store_first(float* p, int lanes) const { _mm512_mask_storeu_ps(p, mask(lanes), v); }
  static __mmask16 mask(int lanes) { return static_cast<__mmask16>((1u << lanes) - 1u); }

  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
};
