// fp8_block128: panel column k is 16 e4m3fn bytes; the scales of the 128 x 128 blocks stand behind all
// panels.
//
//   byte  0     1     ...  15
//         r0,k  r1,k       r15,k                (16 bytes per k)
//   scales: f32 [ceil(out/128), ceil(in/128)], value[i][k] = e4m3(byte) * scale[i/128][k/128]
//
// The grid is ceil-divided with a fixed 128: an edge block of a ragged matrix is simply smaller. A panel lies
// in one block row because 16 divides 128.
#pragma once

#include <cstdint>

#include "base/scalar.h"
#include "format/weight_format.h"

namespace proa::format::fp8_block128 {

inline constexpr int64_t kColumnBytes = kPanelRows;
inline constexpr int64_t kPanelsPerBlock = kFp8Block / kPanelRows;

inline int64_t block_columns(int64_t in_features) noexcept {
  return (in_features + kFp8Block - 1) / kFp8Block;
}
inline int64_t block_rows(int64_t out_features) noexcept {
  return (out_features + kFp8Block - 1) / kFp8Block;
}

inline void encode_panel(const uint8_t* rows, int64_t in_features, int64_t num_rows,
                         std::byte* panel) noexcept {
  auto* dst = reinterpret_cast<uint8_t*>(panel);
  for (int64_t k = 0; k < in_features; ++k)
    for (int64_t r = 0; r < kPanelRows; ++r)
      dst[k * kPanelRows + r] = r < num_rows ? rows[r * in_features + k] : uint8_t{0};
}

// Without the block scale.
inline float decode(const std::byte* panel, int64_t row, int64_t k) noexcept {
  return base::fp8_e4m3_to_f32(reinterpret_cast<const uint8_t*>(panel)[k * kPanelRows + row]);
}

}  // namespace proa::format::fp8_block128
