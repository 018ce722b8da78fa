// int8 activations for the int4 cells: symmetric, one scale per token and 32 columns.
//
//   row:   q int8 [in] | scale f32 [in/32] | offset int32 [in/32] | padding to 64 bytes
//   q of 8 columns 8j .. 8j+7:   8j 8j+2 8j+4 8j+6 | 8j+1 8j+3 8j+5 8j+7     (even, then odd:
//   format/int4_g32.h)
//
//   d = absmax / 127, q = round half to even(x / d) in -127 .. 127, d = 0 gives q = 0
//   offset = -8 * sum(q): the accumulator starts with it, so the dot product may use u = q_w + 8 as stored
//
// A NaN in a group makes its d NaN, and so every output of the token.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "format/int4_g32.h"

namespace proa::gemm {

struct QuantizedRow {
  const int8_t* q;
  const float* scale;
  const int32_t* offset;
};

// Not a multiple of 4096: rows of one token block would fall into one set of the L1 cache.
constexpr int64_t quantized_row_bytes(int64_t in_features) noexcept {
  const int64_t bytes = (in_features + in_features / 4 + 63) / 64 * 64;
  return bytes % 4096 == 0 ? bytes + 64 : bytes;
}

struct QuantizedRowWriter {
  int8_t* q;
  float* scale;
  int32_t* offset;
};

inline QuantizedRowWriter quantized_row_writer(std::byte* row, int64_t in_features) noexcept {
  std::byte* scale = row + in_features;
  return {reinterpret_cast<int8_t*>(row), reinterpret_cast<float*>(scale),
          reinterpret_cast<int32_t*>(scale + in_features / format::kInt4Group * 4)};
}

inline QuantizedRow quantized_row(const std::byte* row, int64_t in_features) noexcept {
  const std::byte* scale = row + in_features;
  return {reinterpret_cast<const int8_t*>(row), reinterpret_cast<const float*>(scale),
          reinterpret_cast<const int32_t*>(scale + in_features / format::kInt4Group * 4)};
}

}  // namespace proa::gemm
