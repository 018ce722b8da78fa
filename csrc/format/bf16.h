// bf16: panel column k is 16 bf16 values.
//
//   byte  0         2         ...  30
//         r0,k      r1,k           r15,k        (32 bytes per k)
#pragma once

#include <cstdint>

#include "base/scalar.h"
#include "format/weight_format.h"

namespace proa::format::bf16 {

inline constexpr int64_t kColumnBytes = 2 * kPanelRows;

inline void encode_panel(const uint16_t* rows, int64_t in_features, int64_t num_rows,
                         std::byte* panel) noexcept {
  auto* dst = reinterpret_cast<uint16_t*>(panel);
  for (int64_t k = 0; k < in_features; ++k)
    for (int64_t r = 0; r < kPanelRows; ++r)
      dst[k * kPanelRows + r] = r < num_rows ? rows[r * in_features + k] : uint16_t{0};
}

inline float decode(const std::byte* panel, int64_t row, int64_t k) noexcept {
  return base::bf16_to_f32(reinterpret_cast<const uint16_t*>(panel)[k * kPanelRows + row]);
}

}  // namespace proa::format::bf16
