// mxfp8 (OCP Microscaling Formats 1.0): e4m3fn elements, one e8m0 scale per row and 32 columns; value = e4m3
// * 2^(scale - 127), NaN where the scale is 255. A panel is a run of blocks of 128 columns, the last one of
// as many as are left:
//
//   byte  0            16           32           48           64
//         16 scales,   16 scales,   16 scales,   16 scales,   16 e4m3 bytes per k, r0 .. r15
//         k = 0 .. 31  32 .. 63     64 .. 95     96 .. 127
//
// Values are floats exactly: the least is 2^-9 * 2^-127, a subnormal. From 2^128 on they are infinite.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/scalar.h"
#include "format/format_info.h"

namespace proa::format::mxfp8 {

inline constexpr int64_t kGroup = 32;  // columns of a scale
inline constexpr int64_t kBlockColumns = 128;
inline constexpr int64_t kColumnBytes = kPanelRows;
inline constexpr int64_t kScaleBytes = kBlockColumns / kGroup * kPanelRows;         // of a block
inline constexpr int64_t kBlockBytes = kScaleBytes + kBlockColumns * kColumnBytes;  // 2112

// Where column k of a panel and the scales of its group stand.
constexpr int64_t column_offset(int64_t k) noexcept {
  return k / kBlockColumns * kBlockBytes + kScaleBytes + k % kBlockColumns * kColumnBytes;
}
constexpr int64_t scales_offset(int64_t k) noexcept {
  return k / kBlockColumns * kBlockBytes + k % kBlockColumns / kGroup * kPanelRows;
}

inline const char* reject(const Shape& shape) noexcept {
  return shape.in_features % kGroup == 0 ? nullptr : "in_features is not a multiple of the group of 32";
}

inline RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
  if (layout != RawLayout::kRows) return {};
  return {matrix(Element::kE4m3, shape.out_features, shape.in_features),
          matrix(Element::kE8m0, shape.out_features, shape.in_features / kGroup)};
}

inline int64_t panel_bytes(int64_t in_features) noexcept {
  return ceil_div(in_features, kBlockColumns) * kScaleBytes + in_features * kColumnBytes;
}

inline void pack_panel(const RawWeight& raw, int64_t panel, std::byte* panel_memory) noexcept {
  const int64_t in = raw.shape.in_features, groups = in / kGroup;
  const int64_t first_row = panel * kPanelRows, num_rows = rows_of_panel(raw.shape, panel);
  const auto* rows = static_cast<const uint8_t*>(raw.data) + first_row * in;
  const auto* scales = static_cast<const uint8_t*>(raw.scales) + first_row * groups;
  auto* dst = reinterpret_cast<uint8_t*>(panel_memory);
  for (int64_t k = 0; k < in; k += kBlockColumns) std::memset(dst + scales_offset(k), 0, kScaleBytes);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = 0; r < num_rows; ++r) dst[scales_offset(g * kGroup) + r] = scales[r * groups + g];
  for (int64_t k = 0; k < in; ++k)
    for (int64_t r = 0; r < kPanelRows; ++r)
      dst[column_offset(k) + r] = r < num_rows ? rows[r * in + k] : uint8_t{0};
}

inline float decode(const std::byte* panel, int64_t row, int64_t k) noexcept {
  const auto* src = reinterpret_cast<const uint8_t*>(panel);
  return base::fp8_e4m3_to_f32(src[column_offset(k) + row]) * base::e8m0_to_f32(src[scales_offset(k) + row]);
}

inline float decode_element(const std::byte* panel, int64_t, int64_t row, int64_t k) noexcept {
  return decode(panel, row, k);
}

inline constexpr FormatInfo kInfo = {WeightFormat::kMxFp8, "mxfp8",    reject,        raw_spec, false,
                                     panel_bytes,          pack_panel, decode_element};

}  // namespace proa::format::mxfp8
