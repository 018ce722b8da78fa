// Codes and scales of grouped formats in 512-bit registers, 16 rows at a time. Include inside an ISA's target
// region and namespace.

// The codes of a group as 8 u8 quads per row (format/grouped.h).
template <class F>
inline void load_quads(const std::byte* group, __m512i (&quads)[8]) noexcept {
  __m512i words[F::kBits];
#pragma GCC unroll 8
  for (int w = 0; w < F::kBits; ++w) words[w] = _mm512_loadu_si512(group + 64 * w);
  if constexpr (F::kBits == 8) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) quads[j] = words[j];
    return;
  }
  constexpr int kLow = F::kBits >= 4 ? 4 : 2, kHigh = F::kBits - kLow;
  constexpr int kLowPer = 8 / kLow;
  const __m512i low = _mm512_set1_epi8((1 << kLow) - 1);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j)
    quads[j] = _mm512_and_si512(_mm512_srli_epi16(words[j / kLowPer], kLow * (j % kLowPer)), low);
  if constexpr (kHigh > 0) {
    constexpr int kHighPer = 8 / kHigh;
    const __m512i high = _mm512_set1_epi8(((1 << kHigh) - 1) << kLow);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const __m512i word = words[kLow + j / kHighPer];
      const int right = kHigh * (j % kHighPer) - kLow;
      const __m512i moved = right > 0 ? _mm512_srli_epi16(word, right) : _mm512_slli_epi16(word, -right);
      quads[j] = _mm512_or_si512(quads[j], _mm512_and_si512(moved, high));
    }
  }
  if constexpr (F::kCodes != format::CodeKind::kLinear) {
    const __m512i values =
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(format::kCodeTable<F>)));
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) quads[j] = _mm512_shuffle_epi8(values, quads[j]);
  }
}

inline __m512i load_bytes(const std::byte* src) noexcept {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
}
inline __m256i load_halves(const std::byte* src) noexcept {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

// scale_value of 16 rows.
template <format::ScaleKind kKind>
inline __m512 load_scales(const std::byte* src) noexcept {
  using enum format::ScaleKind;
  if constexpr (kKind == kBf16)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(src)), 16));
  if constexpr (kKind == kF16) return _mm512_cvtph_ps(load_halves(src));
  if constexpr (kKind == kE8m0) {
    const __m512i bytes = load_bytes(src);
    const __m512i power = _mm512_mask_mov_epi32(
        _mm512_slli_epi32(bytes, 23), _mm512_testn_epi32_mask(bytes, bytes), _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(0xff));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(power, nan, _mm512_set1_epi32(0x7fc00000)));
  }
  if constexpr (kKind == kE4m3) {
    // Moved up 7 bits, its sign 8, a byte is the fp16 of 2^-8 times the value, subnormals included; the NaN
    // would become 480: all its exponent bits are set.
    const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
    const __m256i nan = _mm256_set1_epi16(0x3f80);
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, nan), nan);
    const __m256i fixed = _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7f80)));
    return _mm512_mul_ps(_mm512_cvtph_ps(fixed), _mm512_set1_ps(256.0f));
  }
  if constexpr (kKind == kSubPair)
    return _mm512_cvtepi32_ps(_mm512_and_si512(load_bytes(src), _mm512_set1_epi32(0x0f)));
  if constexpr (kKind == kSub)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))));
}

// The minimums that stand at `src`, without their dmin.
template <format::ScaleKind kKind>
inline __m512 load_minimums(const std::byte* src) noexcept {
  if constexpr (kKind == format::ScaleKind::kSubPair)
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(load_bytes(src), 4));
  return load_scales<kKind>(src);
}

// The scales of a super-block of `groups` groups.
template <class F>
struct SuperScales {
  using Layout = format::GroupedLayout<F>;
  const std::byte* scales;
  const std::byte* mins;
  __m512 d, dmin;

  SuperScales() noexcept = default;
  SuperScales(const std::byte* super, int64_t groups) noexcept
      : scales(super + Layout::scale_offset(groups)), mins(super + Layout::min_offset(groups)) {
    if constexpr (!format::is_sub(F::kScale)) return;
    const std::byte* src = super + groups * Layout::kGroupBytes;
    d = load_scales<format::ScaleKind::kF16>(src);
    if constexpr (F::kMinimum)
      dmin = _mm512_sub_ps(_mm512_setzero_ps(),
                           load_scales<format::ScaleKind::kF16>(src + 2 * format::kPanelRows));
  }
  // Of the columns from `column` of the super-block on.
  __m512 scale(int64_t column) const noexcept {
    const __m512 value = load_scales<F::kScale>(scales + column / F::kScaleColumns * Layout::kScaleBytes);
    if constexpr (format::is_sub(F::kScale)) return _mm512_mul_ps(value, d);
    return format::kCodeUnit<F> == 1.0f ? value : _mm512_mul_ps(value, _mm512_set1_ps(format::kCodeUnit<F>));
  }
  __m512 minimum(int64_t column) const noexcept {
    const __m512 value = load_minimums<F::kScale>(mins + column / F::kScaleColumns * Layout::kScaleBytes);
    return format::is_sub(F::kScale) ? _mm512_mul_ps(value, dmin) : value;
  }
};
