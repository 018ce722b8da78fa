// nvfp4: E2M1 elements, one E4M3 scale per row and 16 columns and one float for the whole tensor; value =
// e2m1 * scale * global. The float stands at the end of every panel, once per row, so a panel needs nothing
// else; it multiplies the finished sums.
//
// Rows: nibbles uint8 [out, in/2], element 2b in the low half of byte b; scales uint8 [out, in/16]. in is a
// multiple of 32.
#pragma once

#include "format/int4.h"

namespace proa::format {

struct NvFp4 {
  static constexpr WeightFormat kFormat = WeightFormat::kNvFp4;
  static constexpr const char* kName = "nvfp4";
  static constexpr int kBits = 4;
  static constexpr CodeKind kCodes = CodeKind::kE2m1;
  static constexpr int kOffset = kE2m1Offset;
  static constexpr int64_t kColumns = 64;  // 576 bytes: whole cache lines
  static constexpr int64_t kScaleColumns = 16;
  static constexpr ScaleKind kScale = ScaleKind::kE4m3;
  static constexpr bool kMinimum = false;
  static constexpr bool kRowScale = true;
  static constexpr int64_t kStep = 32;
  static constexpr const char* kReject = "in_features is not a multiple of 32";

  static RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
    if (layout != RawLayout::kRows) return {};
    return {matrix(Element::kCode, shape.out_features, shape.in_features / 2),
            matrix(Element::kE4m3, shape.out_features, shape.in_features / 16)};
  }

  static void read(const RawWeight& raw, int64_t row, int64_t super, int64_t groups,
                   GroupedRow<NvFp4>& out) noexcept {
    read_nibble_rows(raw, row, super, groups, out);
  }
};

}  // namespace proa::format
