// int8 activations for the cells of grouped formats: symmetric, one scale per token and 32 columns; in groups
// that are fine (act_budget.h) with a second plane.
//
//   row:   q int8 [in] | high int8 [in] | scale f32 [in/32] | sums [in/32], or [in/16] with halves; twice for
//          formats with a minimum | fine u8 [in/32] | padding to 64 bytes
//   fine: 0 or 1
//   q and high of 8 columns 8j .. 8j+7:   8j 8j+2 8j+4 8j+6 | 8j+1 8j+3 8j+5 8j+7     (even, then odd:
//   format/grouped.h)
//
//   d = absmax / 127, fine: / 1016; v = round half to even(x / d) in -127 .. 127, fine: -1016 .. 1016; d = 0
//   gives v = 0
//   q = v; fine: high = (v + 4) >> 3 in -127 .. 127, q = v - 8 * high in -4 .. 3; else high is not written
//   sums: what the columns of one weight scale contribute whatever the weights are,
//     int32 -offset * sum(v), for formats without a minimum: the accumulator starts with it, so the dot
//           product may use the unsigned codes as stored,
//     f32   sum(x), for formats with one: times the minimum it is a term of the result,
//     f32   kMiddleCode * (sum(x) - d * sum(v)), behind the others: times the weight scale another. Codes of
//           these formats are all positive, so much of a weight is the same for a whole group, and what
//           rounding leaves of sum(x) would not average out
//   sum(x) of 16 columns: halves added, then quarters, and so on; of 32: the sum of the two
//
// Sums of 32 products are below 2^23: exact as floats.
// A NaN in a group makes its d NaN, and so every output of the token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "format/grouped.h"
#include "gemm/kernel.h"
#include "gemm/row_stride.h"

namespace proa::gemm {

// How the rows of a grouped format are quantized.
template <class F>
inline constexpr ActFormat kGroupedAct =
    format::GroupedLayout<F>::kHalves == 2 ? ActFormat::kInt8G32Halves : ActFormat::kInt8G32;

// Sums of a group, of the columns of one weight scale each.
template <class F>
inline constexpr int64_t kActSums = format::GroupedLayout<F>::kHalves * (F::kMinimum ? 2 : 1);

// The most that kActSums is for groups with one weight scale, or two.
constexpr int64_t most_sums(bool halves) noexcept { return halves ? 4 : 2; }

constexpr int64_t quantized_row_bytes(int64_t in_features, int64_t sums_per_group) noexcept {
  return spread_row_bytes(2 * in_features + (5 + 4 * sums_per_group) * (in_features / format::kGroup));
}

template <class F>
inline constexpr float kMiddleCode = static_cast<float>(format::kLargestCode<F>) / 2.0f;

inline constexpr float kOnePlane = 127.0f, kTwoPlanes = 1016.0f;  // largest |v|
inline constexpr int kHighShift = 3;

struct QuantizedRow {
  const int8_t* q;
  const int8_t* high;
  const uint8_t* fine;
  const float* scale;
  const int32_t* offset;  // the sums as integers or as floats: one of the two is what was written
  const float* sum;
  const float* rest;  // behind the sums; only with a minimum
};

// From the scales of a row to its flags.
constexpr int64_t fine_offset(int64_t in_features, int64_t sums_per_group) noexcept {
  return (1 + sums_per_group) * 4 * (in_features / format::kGroup);
}

template <class F>
inline QuantizedRow quantized_row(const std::byte* row, int64_t in_features) noexcept {
  const std::byte* scale = row + 2 * in_features;
  const std::byte* sums = scale + in_features / format::kGroup * 4;
  return {reinterpret_cast<const int8_t*>(row),
          reinterpret_cast<const int8_t*>(row) + in_features,
          reinterpret_cast<const uint8_t*>(scale + fine_offset(in_features, kActSums<F>)),
          reinterpret_cast<const float*>(scale),
          reinterpret_cast<const int32_t*>(sums),
          reinterpret_cast<const float*>(sums),
          reinterpret_cast<const float*>(sums) +
              format::GroupedLayout<F>::kHalves * (in_features / format::kGroup)};
}

struct QuantizedRowWriter {
  int8_t* q;
  int8_t* high;
  uint8_t* fine;
  float* scale;
  std::byte* sums;
};

template <class F>
inline QuantizedRowWriter quantized_row_writer(std::byte* row, int64_t in_features) noexcept {
  std::byte* scale = row + 2 * in_features;
  return {reinterpret_cast<int8_t*>(row), reinterpret_cast<int8_t*>(row) + in_features,
          reinterpret_cast<uint8_t*>(scale + fine_offset(in_features, kActSums<F>)),
          reinterpret_cast<float*>(scale), scale + in_features / format::kGroup * 4};
}

// The sums of a group's columns 0 .. 15 and 16 .. 31: of v and of x.
struct GroupSums {
  int32_t v[2];
  float x[2];
};

template <class F>
inline void write_sums(float d, const GroupSums& of, int64_t group, int64_t in_features,
                       std::byte* sums) noexcept {
  constexpr int64_t kCount = format::GroupedLayout<F>::kHalves;
  const int32_t v[2] = {kCount == 2 ? of.v[0] : of.v[0] + of.v[1], of.v[1]};
  for (int64_t i = 0; i < kCount; ++i) {
    std::byte* dst = sums + 4 * (group * kCount + i);
    if constexpr (F::kMinimum) {
      const float x = kCount == 2 ? of.x[i] : of.x[0] + of.x[1];
      const float rest = kMiddleCode<F> * (x - d * static_cast<float>(v[i]));
      std::memcpy(dst, &x, 4);
      std::memcpy(dst + 4 * kCount * (in_features / format::kGroup), &rest, 4);
    } else {
      const int32_t offset = -F::kOffset * v[i];
      std::memcpy(dst, &offset, 4);
    }
  }
}

}  // namespace proa::gemm
