// fp8_channel: panel column k is 16 e4m3fn bytes; behind the columns stand the scales of the 16 rows.
//
//   byte  0     1     ...  15
//         r0,k  r1,k       r15,k                (16 bytes per k)
//   scales: f32 [16], value[i][k] = e4m3(byte) * scale[i]
#pragma once

#include <cstdint>
#include <cstring>

#include "base/scalar.h"
#include "format/format_info.h"

namespace proa::format::fp8_channel {

inline constexpr int64_t kColumnBytes = kPanelRows;

// Where the scales of a panel stand.
constexpr int64_t scales_offset(int64_t in_features) noexcept { return in_features * kColumnBytes; }

inline RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
  if (layout != RawLayout::kRows) return {};
  return {matrix(Element::kE4m3, shape.out_features, shape.in_features),
          {Element::kF32, 1, {shape.out_features, 0}}};
}

inline int64_t panel_bytes(int64_t in_features) noexcept {
  return scales_offset(in_features) + 4 * kPanelRows;
}

inline void pack_panel(const RawWeight& raw, int64_t panel, std::byte* panel_memory) noexcept {
  const int64_t in = raw.shape.in_features, num_rows = rows_of_panel(raw.shape, panel);
  const auto* rows = static_cast<const uint8_t*>(raw.data) + panel * kPanelRows * in;
  auto* dst = reinterpret_cast<uint8_t*>(panel_memory);
  for (int64_t k = 0; k < in; ++k)
    for (int64_t r = 0; r < kPanelRows; ++r)
      dst[k * kPanelRows + r] = r < num_rows ? rows[r * in + k] : uint8_t{0};
  float scales[kPanelRows] = {};
  std::memcpy(scales, static_cast<const float*>(raw.scales) + panel * kPanelRows,
              static_cast<size_t>(num_rows) * sizeof(float));
  std::memcpy(panel_memory + scales_offset(in), scales, sizeof(scales));
}

// Without the row's scale.
inline float decode(const std::byte* panel, int64_t row, int64_t k) noexcept {
  return base::fp8_e4m3_to_f32(reinterpret_cast<const uint8_t*>(panel)[k * kPanelRows + row]);
}

inline const float* row_scales(const std::byte* panel, int64_t in_features) noexcept {
  return reinterpret_cast<const float*>(panel + scales_offset(in_features));
}

inline float decode_element(const std::byte* panel, int64_t in_features, int64_t row, int64_t k) noexcept {
  return decode(panel, row, k) * row_scales(panel, in_features)[row];
}

inline constexpr FormatInfo kInfo = {WeightFormat::kFp8Channel,
                                     "fp8_channel",
                                     any_shape,
                                     raw_spec,
                                     false,
                                     panel_bytes,
                                     pack_panel,
                                     decode_element};

}  // namespace proa::format::fp8_channel
