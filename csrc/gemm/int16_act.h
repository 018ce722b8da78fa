// 8- or 16-bit activations for the int8 cells, as two int8 planes: symmetric, one scale per token and 128
// columns. Groups have 16 bits where they are fine (act_budget.h), in others the high plane is 0.
//
//   row, per 64 columns:   high int8 [64] | low int8 [64]        (padded with zeros to whole 64 columns)
//   behind them:           scale f32 [ceil(in/128)] | offset int32 [ceil(in/128)] | fine u8 [ceil(in/128)] |
//                          padding
//
//   d = absmax / 127, fine: / 32512; v = round half to even(x / d) in -127 .. 127, fine: -32512 .. 32512;
//   d = 0 gives v = 0
//   high = (v + 128) >> 8 in -127 .. 127, low = v - 256 * high in -128 .. 127
//   offset = -128 * sum(v): dot products with u = q_w + 128 start with it
//
// A group's dot product is at most 128 * 127 * 32512 < 2^29, so exact in int32.
// A NaN in a group makes its d NaN, and so every output of the token.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/row_stride.h"

namespace proa::gemm {

inline constexpr int64_t kInt16Group = 128;
inline constexpr int64_t kInt16Step = 64;                             // columns of a tile
inline constexpr int64_t kInt16StepBytes = 2 * kInt16Step;            // both planes
inline constexpr float kInt16Coarse = 127.0f, kInt16Fine = 32512.0f;  // largest |v|; 127 * 256

constexpr int64_t int16_groups(int64_t in_features) noexcept {
  return (in_features + kInt16Group - 1) / kInt16Group;
}
constexpr int64_t int16_steps(int64_t in_features) noexcept {
  return (in_features + kInt16Step - 1) / kInt16Step;
}

constexpr int64_t int16_row_bytes(int64_t in_features) noexcept {
  return spread_row_bytes(int16_steps(in_features) * kInt16StepBytes + 9 * int16_groups(in_features));
}

struct Int16Row {
  const int8_t* planes;
  const float* scale;
  const int32_t* offset;
  const uint8_t* fine;

  Int16Row() = default;
  Int16Row(const std::byte* row, int64_t in_features) noexcept
      : planes(reinterpret_cast<const int8_t*>(row)),
        scale(reinterpret_cast<const float*>(row + int16_steps(in_features) * kInt16StepBytes)),
        offset(reinterpret_cast<const int32_t*>(scale + int16_groups(in_features))),
        fine(reinterpret_cast<const uint8_t*>(offset + int16_groups(in_features))) {}
};

struct Int16RowWriter {
  int8_t* planes;
  float* scale;
  int32_t* offset;
  uint8_t* fine;

  Int16RowWriter(std::byte* row, int64_t in_features) noexcept
      : planes(reinterpret_cast<int8_t*>(row)),
        scale(reinterpret_cast<float*>(row + int16_steps(in_features) * kInt16StepBytes)),
        offset(reinterpret_cast<int32_t*>(scale + int16_groups(in_features))),
        fine(reinterpret_cast<uint8_t*>(offset + int16_groups(in_features))) {}
};

// Where the high byte of column k stands; the low one is kInt16Step further.
constexpr int64_t int16_position(int64_t k) noexcept {
  return k / kInt16Step * kInt16StepBytes + k % kInt16Step;
}

}  // namespace proa::gemm
