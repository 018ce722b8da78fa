// Codes and scales of grouped formats in 256-bit registers, 8 rows at a time. Include inside an ISA's target
// region and namespace.

// The codes of a group of rows 8 * half .. 8 * half + 7 as 8 u8 quads per row (format/grouped.h).
template <class F>
inline void load_quads(const std::byte* group, int half, __m256i (&quads)[8]) noexcept {
  const auto word = [&](int w) __attribute__((always_inline)) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + 64 * w + 32 * half));
  };
  if constexpr (F::kBits == 8) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) quads[j] = word(j);
    return;
  }
  constexpr int kLow = F::kBits >= 4 ? 4 : 2, kHigh = F::kBits - kLow;
  constexpr int kLowPer = 8 / kLow;
  const __m256i low = _mm256_set1_epi8((1 << kLow) - 1);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j)
    quads[j] = _mm256_and_si256(_mm256_srli_epi16(word(j / kLowPer), kLow * (j % kLowPer)), low);
  if constexpr (kHigh > 0) {
    constexpr int kHighPer = 8 / kHigh;
    const __m256i high = _mm256_set1_epi8(((1 << kHigh) - 1) << kLow);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const int right = kHigh * (j % kHighPer) - kLow;
      const __m256i bits = word(kLow + j / kHighPer);
      const __m256i moved = right > 0 ? _mm256_srli_epi16(bits, right) : _mm256_slli_epi16(bits, -right);
      quads[j] = _mm256_or_si256(quads[j], _mm256_and_si256(moved, high));
    }
  }
  if constexpr (F::kCodes != format::CodeKind::kLinear) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(format::kCodeTable<F>)));
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) quads[j] = _mm256_shuffle_epi8(values, quads[j]);
  }
}

// scale_value of 8 rows.
template <format::ScaleKind kKind>
inline __m256 load_scales(const std::byte* src) noexcept {
  using enum format::ScaleKind;
  if constexpr (kKind == kBf16 || kKind == kF16) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
    if constexpr (kKind == kF16) return _mm256_cvtph_ps(bits);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  const __m128i bytes8 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src));
  if constexpr (kKind == kE8m0) {
    const __m256i bytes = _mm256_cvtepu8_epi32(bytes8);
    const __m256i zero = _mm256_cmpeq_epi32(bytes, _mm256_setzero_si256());
    const __m256i nan = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(0xff));
    const __m256i power =
        _mm256_or_si256(_mm256_slli_epi32(bytes, 23), _mm256_and_si256(zero, _mm256_set1_epi32(0x00400000)));
    return _mm256_castsi256_ps(_mm256_or_si256(power, _mm256_and_si256(nan, _mm256_set1_epi32(0x7fc00000))));
  }
  if constexpr (kKind == kE4m3) {
    // Moved up 7 bits, its sign 8, a byte is the fp16 of 2^-8 times the value, subnormals included; the NaN
    // would become 480: all its exponent bits are set.
    const __m128i bytes = _mm_cvtepi8_epi16(bytes8);
    const __m128i half = _mm_and_si128(_mm_slli_epi16(bytes, 7), _mm_set1_epi16(static_cast<short>(0xbfff)));
    const __m128i nan = _mm_set1_epi16(0x3f80);
    const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(half, nan), nan);
    const __m128i fixed = _mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7f80)));
    return _mm256_mul_ps(_mm256_cvtph_ps(fixed), _mm256_set1_ps(256.0f));
  }
  if constexpr (kKind == kSubPair)
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_cvtepu8_epi32(bytes8), _mm256_set1_epi32(0x0f)));
  if constexpr (kKind == kSub) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes8));
}

// The minimums that stand at `src`, without their dmin.
template <format::ScaleKind kKind>
inline __m256 load_minimums(const std::byte* src) noexcept {
  if constexpr (kKind == format::ScaleKind::kSubPair) {
    const __m128i bytes8 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src));
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_cvtepu8_epi32(bytes8), 4));
  }
  return load_scales<kKind>(src);
}

// The scales of a super-block of `groups` groups, rows 8 * half and on.
template <class F>
struct SuperScales {
  using Layout = format::GroupedLayout<F>;
  const std::byte* scales;
  const std::byte* mins;
  __m256 d, dmin;

  SuperScales() noexcept = default;
  SuperScales(const std::byte* super, int64_t groups, int half) noexcept
      : scales(super + Layout::scale_offset(groups) + half * (Layout::kScaleBytes / 2)),
        mins(super + Layout::min_offset(groups) + half * (Layout::kScaleBytes / 2)) {
    if constexpr (!format::is_sub(F::kScale)) return;
    const std::byte* src = super + groups * Layout::kGroupBytes + half * format::kPanelRows;
    d = load_scales<format::ScaleKind::kF16>(src);
    if constexpr (F::kMinimum)
      dmin = _mm256_sub_ps(_mm256_setzero_ps(),
                           load_scales<format::ScaleKind::kF16>(src + 2 * format::kPanelRows));
  }
  // Of the columns from `column` of the super-block on.
  __m256 scale(int64_t column) const noexcept {
    const __m256 value = load_scales<F::kScale>(scales + column / F::kScaleColumns * Layout::kScaleBytes);
    if constexpr (format::is_sub(F::kScale)) return _mm256_mul_ps(value, d);
    return format::kCodeUnit<F> == 1.0f ? value : _mm256_mul_ps(value, _mm256_set1_ps(format::kCodeUnit<F>));
  }
  __m256 minimum(int64_t column) const noexcept {
    const __m256 value = load_minimums<F::kScale>(mins + column / F::kScaleColumns * Layout::kScaleBytes);
    return format::is_sub(F::kScale) ? _mm256_mul_ps(value, dmin) : value;
  }
};
