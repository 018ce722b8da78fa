// fp8_block128: panel column k is 16 e4m3fn bytes; behind the columns stand the scales of the 128 x 128
// blocks that the panel runs through.
//
//   byte  0     1     ...  15
//         r0,k  r1,k       r15,k                (16 bytes per k)
//   scales: f32 [ceil(in/128)], value[i][k] = e4m3(byte) * scale[i/128][k/128]
//
// The grid is ceil-divided with a fixed 128: an edge block of a ragged matrix is simply smaller. A panel lies
// in one block row because 16 divides 128.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/scalar.h"
#include "format/format_info.h"

namespace proa::format::fp8_block128 {

inline constexpr int64_t kColumnBytes = kPanelRows;
inline constexpr int64_t kPanelsPerBlock = kFp8Block / kPanelRows;

// Where the scales of a panel stand.
constexpr int64_t scales_offset(int64_t in_features) noexcept { return in_features * kColumnBytes; }

inline RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
  if (layout != RawLayout::kRows) return {};
  return {
      matrix(Element::kE4m3, shape.out_features, shape.in_features),
      matrix(Element::kF32, ceil_div(shape.out_features, kFp8Block), ceil_div(shape.in_features, kFp8Block))};
}

inline int64_t panel_bytes(int64_t in_features) noexcept {
  return scales_offset(in_features) + 4 * ceil_div(in_features, kFp8Block);
}

inline void pack_panel(const RawWeight& raw, int64_t panel, std::byte* panel_memory) noexcept {
  const int64_t in = raw.shape.in_features, num_rows = rows_of_panel(raw.shape, panel);
  const auto* rows = static_cast<const uint8_t*>(raw.data) + panel * kPanelRows * in;
  auto* dst = reinterpret_cast<uint8_t*>(panel_memory);
  for (int64_t k = 0; k < in; ++k)
    for (int64_t r = 0; r < kPanelRows; ++r)
      dst[k * kPanelRows + r] = r < num_rows ? rows[r * in + k] : uint8_t{0};
  const int64_t blocks = ceil_div(in, kFp8Block);
  std::memcpy(panel_memory + scales_offset(in),
              static_cast<const float*>(raw.scales) + panel / kPanelsPerBlock * blocks,
              static_cast<size_t>(4 * blocks));
}

// Without the block scale.
inline float decode(const std::byte* panel, int64_t row, int64_t k) noexcept {
  return base::fp8_e4m3_to_f32(reinterpret_cast<const uint8_t*>(panel)[k * kPanelRows + row]);
}

inline const float* block_scales(const std::byte* panel, int64_t in_features) noexcept {
  return reinterpret_cast<const float*>(panel + scales_offset(in_features));
}

inline float decode_element(const std::byte* panel, int64_t in_features, int64_t row, int64_t k) noexcept {
  return decode(panel, row, k) * block_scales(panel, in_features)[k / kFp8Block];
}

inline constexpr FormatInfo kInfo = {WeightFormat::kFp8Block128,
                                     "fp8_block128",
                                     any_shape,
                                     raw_spec,
                                     false,
                                     panel_bytes,
                                     pack_panel,
                                     decode_element};

}  // namespace proa::format::fp8_block128
