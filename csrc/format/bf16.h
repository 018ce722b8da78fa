// bf16: a panel is lines of two columns k, k + 1 (k even), interleaved.
//
//   byte  0         2         4         6         ...  60        62
//         r0,k      r0,k+1    r1,k      r1,k+1         r15,k     r15,k+1        (64 bytes per pair)
//
// 16 lines are a weight tile of the AMX instructions as it stands; zeros fill the last 32 columns up.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/scalar.h"
#include "format/format_info.h"

namespace proa::format::bf16 {

inline constexpr int64_t kColumnBytes = 2 * kPanelRows;
inline constexpr int64_t kStep = 32;  // columns of a tile

inline RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
  if (layout != RawLayout::kRows) return {};
  return {matrix(Element::kBf16, shape.out_features, shape.in_features), {}};
}

inline int64_t panel_bytes(int64_t in_features) noexcept {
  return ceil_div(in_features, kStep) * kStep * kColumnBytes;
}

// Where column k of a row stands, in values.
constexpr int64_t position(int64_t row, int64_t k) noexcept { return (k / 2 * kPanelRows + row) * 2 + k % 2; }

inline void pack_panel(const RawWeight& raw, int64_t panel, std::byte* panel_memory) noexcept {
  const int64_t in = raw.shape.in_features, num_rows = rows_of_panel(raw.shape, panel);
  const auto* rows = static_cast<const uint16_t*>(raw.data) + panel * kPanelRows * in;
  auto* dst = reinterpret_cast<uint16_t*>(panel_memory);
  if (num_rows < kPanelRows || in % kStep != 0)
    std::memset(panel_memory, 0, static_cast<size_t>(panel_bytes(in)));
  for (int64_t k = 0; k < in; k += 2)
    for (int64_t r = 0; r < num_rows; ++r)
      std::memcpy(dst + position(r, k), rows + r * in + k, k + 1 < in ? 4 : 2);
}

inline float decode(const std::byte* panel, int64_t row, int64_t k) noexcept {
  return base::bf16_to_f32(reinterpret_cast<const uint16_t*>(panel)[position(row, k)]);
}

inline float decode_element(const std::byte* panel, int64_t, int64_t row, int64_t k) noexcept {
  return decode(panel, row, k);
}

inline constexpr FormatInfo kInfo = {WeightFormat::kBf16, "bf16",     any_shape,     raw_spec, false,
                                     panel_bytes,         pack_panel, decode_element};

}  // namespace proa::format::bf16
