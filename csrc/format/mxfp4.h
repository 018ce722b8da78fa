// mxfp4 (OCP MX 1.0): E2M1 elements, one E8M0 scale per row and 32 columns; value = e2m1 * 2^(scale - 127),
// exact, subnormal floats included. A scale of 255 is NaN.
//
// Rows: nibbles uint8 [out, in/2], element 2b in the low half of byte b; scales uint8 [out, in/32]. Also
// GGUF blocks of type MXFP4.
#pragma once

#include "format/int4.h"

namespace proa::format {

struct MxFp4 {
  static constexpr WeightFormat kFormat = WeightFormat::kMxFp4;
  static constexpr const char* kName = "mxfp4";
  static constexpr int kBits = 4;
  static constexpr CodeKind kCodes = CodeKind::kE2m1;
  static constexpr int kOffset = kE2m1Offset;
  static constexpr int64_t kColumns = 128;  // 1088 bytes: whole cache lines
  static constexpr int64_t kScaleColumns = 32;
  static constexpr ScaleKind kScale = ScaleKind::kE8m0;
  static constexpr bool kMinimum = false;
  static constexpr bool kRowScale = false;
  static constexpr int64_t kStep = 32;
  static constexpr const char* kReject = "in_features is not a multiple of the group of 32";

  static RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
    if (layout == RawLayout::kGgml) return ggml_spec<ggml::MxFp4>(shape);
    return {matrix(Element::kCode, shape.out_features, shape.in_features / 2),
            matrix(Element::kE8m0, shape.out_features, shape.in_features / 32)};
  }

  static void read(const RawWeight& raw, int64_t row, int64_t super, int64_t groups,
                   GroupedRow<MxFp4>& out) noexcept {
    if (raw.layout == RawLayout::kRows) return read_nibble_rows(raw, row, super, groups, out);
    for (int64_t g = 0; g < groups; ++g) {
      ggml::Block<kGroup> block;
      ggml::MxFp4::read(ggml_block<ggml::MxFp4>(raw, row, super * (kColumns / kGroup) + g), block);
      words_from_codes<kBits>(block.codes, out.words[g]);
      out.scales[g] = block.scales[0];
    }
  }
};

}  // namespace proa::format
