// f16: panel column k is 16 IEEE binary16 values.
//
//   byte  0         2         ...  30
//         r0,k      r1,k           r15,k        (32 bytes per k)
#pragma once

#include <cstdint>

#include "base/scalar.h"
#include "format/format_info.h"

namespace proa::format::f16 {

inline constexpr int64_t kColumnBytes = 2 * kPanelRows;

inline RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
  if (layout != RawLayout::kRows) return {};
  return {matrix(Element::kF16, shape.out_features, shape.in_features), {}};
}

inline int64_t panel_bytes(int64_t in_features) noexcept { return in_features * kColumnBytes; }

inline void pack_panel(const RawWeight& raw, int64_t panel, std::byte* panel_memory) noexcept {
  const int64_t in = raw.shape.in_features, num_rows = rows_of_panel(raw.shape, panel);
  const auto* rows = static_cast<const uint16_t*>(raw.data) + panel * kPanelRows * in;
  auto* dst = reinterpret_cast<uint16_t*>(panel_memory);
  for (int64_t k = 0; k < in; ++k)
    for (int64_t r = 0; r < kPanelRows; ++r)
      dst[k * kPanelRows + r] = r < num_rows ? rows[r * in + k] : uint16_t{0};
}

inline float decode(const std::byte* panel, int64_t row, int64_t k) noexcept {
  return base::fp16_to_f32(reinterpret_cast<const uint16_t*>(panel)[k * kPanelRows + row]);
}

inline float decode_element(const std::byte* panel, int64_t, int64_t row, int64_t k) noexcept {
  return decode(panel, row, k);
}

inline constexpr FormatInfo kInfo = {WeightFormat::kF16, "f16",      any_shape,     raw_spec, false,
                                     panel_bytes,        pack_panel, decode_element};

}  // namespace proa::format::f16
