// f32: panel column k is 16 floats.
//
//   byte  0         4         ...  60
//         r0,k      r1,k           r15,k        (64 bytes per k)
#pragma once

#include <cstdint>
#include <cstring>

#include "format/weight_format.h"

namespace proa::format::f32 {

inline constexpr int64_t kColumnBytes = 4 * kPanelRows;

inline void encode_panel(const float* rows, int64_t in_features, int64_t num_rows,
                         std::byte* panel) noexcept {
  auto* dst = reinterpret_cast<float*>(panel);
  for (int64_t k = 0; k < in_features; ++k)
    for (int64_t r = 0; r < kPanelRows; ++r)
      dst[k * kPanelRows + r] = r < num_rows ? rows[r * in_features + k] : 0.0f;
}

inline float decode(const std::byte* panel, int64_t row, int64_t k) noexcept {
  return reinterpret_cast<const float*>(panel)[k * kPanelRows + row];
}

}  // namespace proa::format::f32
