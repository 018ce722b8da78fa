// Grouped formats as weights of f32_act-inl.h, 16 rows in a 512-bit register. Include inside an ISA's target
// region and namespace, after grouped_codes-inl.h and Vec.

// Codes below 16 as numbers.
template <class F>
struct alignas(64) Numbers {
  float values[16] = {};
  constexpr Numbers() {
    for (int code = 0; code < 16; ++code)
      values[code] = static_cast<float>(format::dot_code<F>(code) - F::kOffset);
  }
};
template <class F>
inline constexpr Numbers<F> kNumbers{};

// Columns 8j .. 8j + 7 of a group as numbers.
template <class F>
inline void load_codes(const std::byte* group, int j, Vec (&columns)[8]) noexcept {
  if constexpr (F::kBits <= 4) {  // the permute looks at the low 4 bits only
    const __m512 table = _mm512_load_ps(kNumbers<F>.values);
    __m512i even, odd;
    if constexpr (F::kBits == 4) {
      even = _mm512_loadu_si512(group + 64 * j);
      odd = _mm512_srli_epi32(even, 4);
    } else {
      __m512i quads[8];
      load_quads<F>(group, quads);
      even = quads[2 * j];
      odd = quads[2 * j + 1];
    }
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {
      columns[2 * b].v = _mm512_permutexvar_ps(_mm512_srli_epi32(even, 8 * b), table);
      columns[2 * b + 1].v = _mm512_permutexvar_ps(_mm512_srli_epi32(odd, 8 * b), table);
    }
  } else {
    __m512i quads[8];
    load_quads<F>(group, quads);
    // As the low mantissa bits of 2^23, which is then subtracted with the offset.
    const __m512i byte = _mm512_set1_epi32(0xff), one = _mm512_set1_epi32(0x4b000000);
    const __m512 less = _mm512_set1_ps(0x1p23f + static_cast<float>(F::kOffset));
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      const __m512i code = _mm512_srli_epi32(quads[2 * j + c % 2], 8 * (c / 2));
      columns[c].v =
          _mm512_sub_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(code, byte, one, 0xea)), less);
    }
  }
}

template <class F>
struct Grouped {
  using Layout = format::GroupedLayout<F>;
  static constexpr auto kFormat = F::kFormat;
  static constexpr Scaling kScaling = F::kRowScale ? Scaling::kPerRow : Scaling::kInColumns;
  static constexpr int kGroup = format::kGroup;
  static constexpr int kLoad = 8;

  struct Group {
    const std::byte* codes;
    Vec scale[Layout::kHalves];
    Vec minimum[Layout::kHalves];
    void load(int j, Vec (&columns)[kLoad]) const {
      load_codes<F>(codes, j, columns);
      const int half = Layout::kHalves == 1 ? 0 : j / 2;
#pragma GCC unroll 8
      for (int c = 0; c < kLoad; ++c)
        columns[c] = F::kMinimum ? Vec::fma(columns[c], scale[half], minimum[half])
                                 : Vec::mul(columns[c], scale[half]);
    }
  };

  static constexpr int64_t offset(int64_t k) {
    return k * Layout::super_bytes(Layout::kGroups) / F::kColumns;
  }
  static Group group(const std::byte* panel, int64_t k, int64_t in_features) {
    const int64_t first = k / F::kColumns * F::kColumns, left = (in_features - first) / kGroup;
    const int64_t groups = left < Layout::kGroups ? left : Layout::kGroups;
    const std::byte* super = panel + k / F::kColumns * Layout::super_bytes(Layout::kGroups);
    const SuperScales<F> scales(super, groups);
    Group result;
    result.codes = super + (k - first) / kGroup * Layout::kGroupBytes;
#pragma GCC unroll 2
    for (int h = 0; h < Layout::kHalves; ++h) {
      result.scale[h].v = scales.scale(k - first + 16 * h);
      if constexpr (F::kMinimum) result.minimum[h].v = scales.minimum(k - first + 16 * h);
    }
    return result;
  }
  static const float* row_scales(const std::byte* panel, int64_t in_features) {
    return reinterpret_cast<const float*>(panel + Layout::row_scale_offset(in_features));
  }
};
