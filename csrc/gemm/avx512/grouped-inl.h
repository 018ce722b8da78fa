// What the cells of grouped formats with 512-bit registers share. Include inside an ISA's target region and
// namespace, after Vec and beside the definition of `dot_quads`.

using format::kGroup;

constexpr int streams_of(int tokens) noexcept { return tokens == 1 ? 4 : tokens <= 4 ? 2 : 1; }
constexpr int64_t kPrefetchBytes = 4096;

// `dot` plus, for each of 16 rows, the u8 quads first .. first + count - 1 times the int8 quads at q.
template <class F>
inline __m512i dot_quads(__m512i dot, const __m512i (&quads)[8], int first, int count,
                         const int8_t* q) noexcept;

void quantize_group(const float* x, int8_t* q, float* scale, int32_t (&halves)[2]) noexcept {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  // As integers, so that a NaN wins over every number.
  const __m512i sign_off = _mm512_set1_epi32(0x7fffffff);
  const __m512i magnitude = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), sign_off),
                                             _mm512_and_si512(_mm512_castps_si512(b), sign_off));
  const float d = std::bit_cast<float>(_mm512_reduce_max_epu32(magnitude)) / 127.0f;
  const __mmask16 nonzero = d == 0.0f ? 0 : 0xffff;
  const __m512 divisor = _mm512_set1_ps(d), low = _mm512_set1_ps(-127.0f), high = _mm512_set1_ps(127.0f);
  const __m512 ra = _mm512_min_ps(high, _mm512_max_ps(_mm512_maskz_div_ps(nonzero, a, divisor), low));
  const __m512 rb = _mm512_min_ps(high, _mm512_max_ps(_mm512_maskz_div_ps(nonzero, b, divisor), low));
  const __m512i ia = _mm512_cvtps_epi32(ra), ib = _mm512_cvtps_epi32(rb);
  *scale = d;
  halves[0] = _mm512_reduce_add_epi32(ia);
  halves[1] = _mm512_reduce_add_epi32(ib);
  // Of each 8 bytes: the even ones, then the odd ones.
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(ib), _mm512_cvtepi32_epi8(ia));
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_shuffle_epi8(bytes, order));
}

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

// Group `i` of a super-block, group `g` of the row: what its columns add to the totals.
template <class F, int M>
inline void multiply_group(const __m512i (&quads)[8], const SuperScales<F>& scales, int64_t i, int64_t g,
                           const QuantizedRow* x, Vec (&total)[M]) noexcept {
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
      const __m512i start =
          F::kMinimum ? _mm512_setzero_si512() : _mm512_set1_epi32(x[m].offset[g * kHalves + h]);
      const __m512i dot = dot_quads<F>(start, quads, kQuads * h, kQuads, x[m].q + g * kGroup);
      const __m512 factor = _mm512_mul_ps(scale[h], _mm512_set1_ps(x[m].scale[g]));
      total[m].v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), factor, total[m].v);
      if constexpr (F::kMinimum)
        total[m].v = _mm512_fmadd_ps(minimum[h], _mm512_set1_ps(x[m].sum[g * kHalves + h]), total[m].v);
    }
  }
}

template <class F, int M, int P>
void multiply_panels(const Panels& panels, const QuantizedRow* x, float* out, int64_t out_stride) noexcept {
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
        multiply_group<F, M>(quads, scales[p], i, group, x, total[p]);
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
