// int8 activations for the cells of grouped formats: symmetric, one scale per token and 32 columns.
//
//   row:   q int8 [in] | scale f32 [in/32] | sums [in/32], or [in/16] with halves | padding to 64 bytes
//   q of 8 columns 8j .. 8j+7:   8j 8j+2 8j+4 8j+6 | 8j+1 8j+3 8j+5 8j+7     (even, then odd:
//   format/grouped.h)
//
//   d = absmax / 127, q = round half to even(x / d) in -127 .. 127, d = 0 gives q = 0
//   sums: what the columns of one weight scale contribute whatever the weights are,
//     int32 -offset * sum(q), for formats without a minimum: the accumulator starts with it, so the dot
//           product may use the unsigned codes as stored,
//     f32   d * sum(q), for formats with one: times the minimum it is a term of the result
//
// A NaN in a group makes its d NaN, and so every output of the token.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "format/grouped.h"
#include "gemm/kernel.h"
#include "gemm/row_stride.h"

namespace proa::gemm {

// How the rows of a grouped format are quantized.
template <class F>
inline constexpr ActFormat kGroupedAct =
    format::GroupedLayout<F>::kHalves == 2 ? ActFormat::kInt8G32Halves : ActFormat::kInt8G32;

constexpr int64_t quantized_row_bytes(int64_t in_features, int64_t sums_per_group) noexcept {
  return spread_row_bytes(in_features + (1 + sums_per_group) * (in_features / 8));
}

struct QuantizedRow {
  const int8_t* q;
  const float* scale;
  const int32_t* offset;  // the sums as integers or as floats: one of the two is what was written
  const float* sum;
};

inline QuantizedRow quantized_row(const std::byte* row, int64_t in_features) noexcept {
  const std::byte* scale = row + in_features;
  const std::byte* sums = scale + in_features / format::kGroup * 4;
  return {reinterpret_cast<const int8_t*>(row), reinterpret_cast<const float*>(scale),
          reinterpret_cast<const int32_t*>(sums), reinterpret_cast<const float*>(sums)};
}

struct QuantizedRowWriter {
  int8_t* q;
  float* scale;
  std::byte* sums;
};

inline QuantizedRowWriter quantized_row_writer(std::byte* row, int64_t in_features) noexcept {
  std::byte* scale = row + in_features;
  return {reinterpret_cast<int8_t*>(row), reinterpret_cast<float*>(scale),
          scale + in_features / format::kGroup * 4};
}

// Writes the sums of one group from those of its two halves.
template <class F>
inline void write_sums(float d, const int32_t (&halves)[2], int64_t group, std::byte* sums) noexcept {
  constexpr int64_t kCount = format::GroupedLayout<F>::kHalves;
  const int32_t of[2] = {kCount == 2 ? halves[0] : halves[0] + halves[1], halves[1]};
  for (int64_t i = 0; i < kCount; ++i) {
    const auto bits =
        F::kMinimum ? std::bit_cast<int32_t>(d * static_cast<float>(of[i])) : -F::kOffset * of[i];
    reinterpret_cast<int32_t*>(sums)[group * kCount + i] = bits;
  }
}

}  // namespace proa::gemm
