// int8_g128: signed 8-bit weights q in -127 .. 127 with one bf16 scale per row and 128 columns; value = q *
// scale. A panel is its codes, 64 columns at a time, and behind them its scales:
//
//   byte     0 .. 3         4 .. 7        ...  60 .. 63
//            r0, k..k+3     r1, k..k+3         r15, k..k+3        quad k = 0, 4, 8, ... (64 bytes each)
//   scales:  16 x bf16 per group of 128 columns
//
// 16 quads are a weight tile of the AMX instructions as it stands. The codes are padded with zeros to whole
// 64 columns, so that the last tile is whole too; the last group may have fewer than 128.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/scalar.h"
#include "format/format_info.h"

namespace proa::format::int8_g128 {

inline constexpr int64_t kGroup = 128;
inline constexpr int64_t kStep = 64;  // columns of a tile
inline constexpr int64_t kQuadBytes = 4 * kPanelRows;
inline constexpr int64_t kStepBytes = kStep * kPanelRows;
inline constexpr int64_t kScaleBytes = 2 * kPanelRows;
inline constexpr int kOffset = 128;  // q + kOffset is the u8 that dpbusd wants

constexpr int64_t groups(int64_t in_features) noexcept { return ceil_div(in_features, kGroup); }
constexpr int64_t steps(int64_t in_features) noexcept { return ceil_div(in_features, kStep); }
// Where the scales of a panel stand.
constexpr int64_t scales_offset(int64_t in_features) noexcept { return steps(in_features) * kStepBytes; }

inline const char* reject(const Shape& shape) noexcept {
  return shape.in_features % 32 == 0 ? nullptr : "in_features is not a multiple of 32";
}

inline RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
  if (layout != RawLayout::kRows) return {};
  return {matrix(Element::kInt8, shape.out_features, shape.in_features),
          matrix(Element::kBf16, shape.out_features, groups(shape.in_features))};
}

constexpr int64_t panel_bytes(int64_t in_features) noexcept {
  return scales_offset(in_features) + groups(in_features) * kScaleBytes;
}

inline void pack_panel(const RawWeight& raw, int64_t panel_index, std::byte* panel) noexcept {
  const int64_t in = raw.shape.in_features, num_groups = groups(in);
  const int64_t num_rows = rows_of_panel(raw.shape, panel_index);
  const auto* codes = static_cast<const std::byte*>(raw.data) + panel_index * kPanelRows * in;
  const auto* scales = static_cast<const uint16_t*>(raw.scales) + panel_index * kPanelRows * num_groups;
  const int64_t quads = in / 4;
  for (int64_t j = 0; j < quads; ++j)
    for (int64_t r = 0; r < num_rows; ++r)
      std::memcpy(panel + j * kQuadBytes + 4 * r, codes + r * in + 4 * j, 4);
  if (num_rows < kPanelRows)
    for (int64_t j = 0; j < quads; ++j)
      std::memset(panel + j * kQuadBytes + 4 * num_rows, 0, static_cast<size_t>(4 * (kPanelRows - num_rows)));
  std::memset(panel + quads * kQuadBytes, 0, static_cast<size_t>(scales_offset(in) - quads * kQuadBytes));
  auto* dst = reinterpret_cast<uint16_t*>(panel + scales_offset(in));
  for (int64_t g = 0; g < num_groups; ++g)
    for (int64_t r = 0; r < kPanelRows; ++r)
      dst[g * kPanelRows + r] = r < num_rows ? scales[r * num_groups + g] : uint16_t{0};
}

inline int decode_q(const std::byte* panel, int64_t row, int64_t k) noexcept {
  return static_cast<int8_t>(panel[k / 4 * kQuadBytes + 4 * row + k % 4]);
}

inline float decode_scale(const std::byte* panel, int64_t in_features, int64_t row, int64_t group) noexcept {
  const auto* scales = reinterpret_cast<const uint16_t*>(panel + scales_offset(in_features));
  return base::bf16_to_f32(scales[group * kPanelRows + row]);
}

inline float decode_element(const std::byte* panel, int64_t in_features, int64_t row, int64_t k) noexcept {
  return static_cast<float>(decode_q(panel, row, k)) * decode_scale(panel, in_features, row, k / kGroup);
}

inline constexpr FormatInfo kInfo = {
    WeightFormat::kInt8G128, "int8_g128", reject, raw_spec, false, panel_bytes, pack_panel, decode_element};

}  // namespace proa::format::int8_g128
