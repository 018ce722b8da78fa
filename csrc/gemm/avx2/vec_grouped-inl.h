// Grouped formats as weights of f32_act-inl.h, 16 rows in two 256-bit registers. Include inside an ISA's
// target region and namespace, after grouped_codes-inl.h and Vec.

// Columns 8j .. 8j + 7 of a group as numbers, 8 rows.
template <class F>
inline void load_codes(const std::byte* group, int half, int j, __m256 (&columns)[8]) noexcept {
  __m256i quads[8];
  load_quads<F>(group, half, quads);
  const __m256i offset = _mm256_set1_epi8(static_cast<char>(F::kOffset));
  // Without the offset all codes but those of 8 bits are positive int8, with it all are int8.
  const __m256i even = _mm256_sub_epi8(quads[2 * j], offset), odd = _mm256_sub_epi8(quads[2 * j + 1], offset);
#pragma GCC unroll 8
  for (int c = 0; c < 8; ++c) {
    const __m256i top = _mm256_slli_epi32(c % 2 == 0 ? even : odd, 24 - 8 * (c / 2));
    columns[c] = _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 24));
  }
}

template <class F>
struct Grouped {
  using Layout = format::GroupedLayout<F>;
  static_assert(F::kBits < 8 || F::kOffset == 128);
  static constexpr auto kFormat = F::kFormat;
  static constexpr Scaling kScaling = F::kRowScale ? Scaling::kPerRow : Scaling::kInColumns;
  static constexpr int kGroup = format::kGroup;
  static constexpr int kLoad = 8;

  struct Group {
    const std::byte* codes;
    Vec scale[Layout::kHalves];
    Vec minimum[Layout::kHalves];
    void load(int j, Vec (&columns)[kLoad]) const {
      __m256 lo[8], hi[8];
      load_codes<F>(codes, 0, j, lo);
      load_codes<F>(codes, 1, j, hi);
      const int half = Layout::kHalves == 1 ? 0 : j / 2;
#pragma GCC unroll 8
      for (int c = 0; c < kLoad; ++c) {
        const Vec code = {lo[c], hi[c]};
        columns[c] = F::kMinimum ? Vec::fma(code, scale[half], minimum[half]) : Vec::mul(code, scale[half]);
      }
    }
  };

  static constexpr int64_t offset(int64_t k) {
    return k * Layout::super_bytes(Layout::kGroups) / F::kColumns;
  }
  static Group group(const std::byte* panel, int64_t k, int64_t in_features) {
    const int64_t first = k / F::kColumns * F::kColumns, left = (in_features - first) / kGroup;
    const int64_t groups = left < Layout::kGroups ? left : Layout::kGroups;
    const std::byte* super = panel + k / F::kColumns * Layout::super_bytes(Layout::kGroups);
    const SuperScales<F> lo(super, groups, 0), hi(super, groups, 1);
    Group result;
    result.codes = super + (k - first) / kGroup * Layout::kGroupBytes;
#pragma GCC unroll 2
    for (int h = 0; h < Layout::kHalves; ++h) {
      const int64_t column = k - first + 16 * h;
      result.scale[h] = {lo.scale(column), hi.scale(column)};
      if constexpr (F::kMinimum) result.minimum[h] = {lo.minimum(column), hi.minimum(column)};
    }
    return result;
  }
  static const float* row_scales(const std::byte* panel, int64_t in_features) {
    return reinterpret_cast<const float*>(panel + Layout::row_scale_offset(in_features));
  }
};
