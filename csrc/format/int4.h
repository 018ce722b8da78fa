// int4_g*: signed 4-bit weights q stored as u = q + 8, one scale per row and 32, 64 or 128 columns, bf16 or
// (int4_g*_f16, what GPTQ and Q4_0 store) fp16; value = (u - 8) * scale.
//
// Rows: nibbles uint8 [out, in/2], element 2b in the low half of byte b; scales uint16 [out, in/group].
// Groups of 32 with fp16 scales also come as GGUF blocks of type Q4_0.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

// One row of a super-block whose codes are nibbles in the order of the packed words, from matrices of codes
// and scales.
template <class F>
inline void read_nibble_rows(const RawWeight& raw, int64_t row, int64_t super, int64_t groups,
                             GroupedRow<F>& out) noexcept {
  using Scale = typename GroupedRow<F>::Scale;
  const int64_t in = raw.shape.in_features;
  const auto* codes = static_cast<const std::byte*>(raw.data) + row * (in / 2) + super * (F::kColumns / 2);
  std::memcpy(out.words, codes, static_cast<size_t>(groups * kGroup / 2));
  const auto* scales = static_cast<const Scale*>(raw.scales) + row * (in / F::kScaleColumns) +
                       super * GroupedLayout<F>::kScales;
  std::memcpy(out.scales, scales, static_cast<size_t>(GroupedLayout<F>::scales(groups)) * sizeof(Scale));
}

// kGroupColumns a scale; kPerSuper scales in a super-block.
template <WeightFormat format, int64_t kGroupColumns, ScaleKind kind, int64_t kPerSuper = 1>
struct Int4 {
  static constexpr WeightFormat kFormat = format;
  static constexpr bool kFp16 = kind == ScaleKind::kF16;
  static constexpr const char* kName = kGroupColumns == 32   ? (kFp16 ? "int4_g32_f16" : "int4_g32")
                                       : kGroupColumns == 64 ? (kFp16 ? "int4_g64_f16" : "int4_g64")
                                                             : (kFp16 ? "int4_g128_f16" : "int4_g128");
  static constexpr int kBits = 4;
  static constexpr CodeKind kCodes = CodeKind::kLinear;
  static constexpr int kOffset = 8;
  static constexpr int64_t kColumns = kGroupColumns * kPerSuper;
  static constexpr int64_t kScaleColumns = kGroupColumns;
  static constexpr ScaleKind kScale = kind;
  static constexpr bool kMinimum = false;
  static constexpr bool kRowScale = false;
  static constexpr int64_t kStep = kGroupColumns;
  static constexpr const char* kReject =
      kGroupColumns == 32   ? "in_features is not a multiple of the group of 32"
      : kGroupColumns == 64 ? "in_features is not a multiple of the group of 64"
                            : "in_features is not a multiple of the group of 128";
  static constexpr bool kGgml = kGroupColumns == 32 && kFp16;

  static RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
    if (layout == RawLayout::kGgml) return kGgml ? ggml_spec<ggml::Q4_0>(shape) : RawSpec{};
    return {matrix(Element::kCode, shape.out_features, shape.in_features / 2),
            matrix(kFp16 ? Element::kF16 : Element::kBf16, shape.out_features,
                   shape.in_features / kGroupColumns)};
  }

  static void read(const RawWeight& raw, int64_t row, int64_t super, int64_t groups,
                   GroupedRow<Int4>& out) noexcept {
    if (raw.layout == RawLayout::kRows) return read_nibble_rows(raw, row, super, groups, out);
    if constexpr (kGgml)
      for (int64_t g = 0; g < groups; ++g) {
        ggml::Block<kGroup> block;
        ggml::Q4_0::read(ggml_block<ggml::Q4_0>(raw, row, super * (kColumns / kGroup) + g), block);
        words_from_codes<kBits>(block.codes, out.words[g]);
        out.scales[g] = block.d;
      }
  }
};

using Int4G32 = Int4<WeightFormat::kInt4G32, 32, ScaleKind::kBf16>;
// Two scales in a super-block make it whole cache lines.
using Int4G64 = Int4<WeightFormat::kInt4G64, 64, ScaleKind::kBf16, 2>;
using Int4G128 = Int4<WeightFormat::kInt4G128, 128, ScaleKind::kBf16, 2>;
using Int4G32F16 = Int4<WeightFormat::kInt4G32F16, 32, ScaleKind::kF16, 2>;
using Int4G64F16 = Int4<WeightFormat::kInt4G64F16, 64, ScaleKind::kF16, 2>;
using Int4G128F16 = Int4<WeightFormat::kInt4G128F16, 128, ScaleKind::kF16, 2>;

}  // namespace proa::format
