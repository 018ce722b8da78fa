// Memory that activations take in the form a cell reads.
#pragma once

#include <cstdint>

#include "gemm/int16_act.h"
#include "gemm/kernel.h"
#include "gemm/quantized_act.h"
#include "gemm/split_act.h"

namespace proa::gemm {

// Bytes of a row that a cell's `quantize` writes, a multiple of 64; 0 for kF32, which has none.
constexpr int64_t act_row_bytes(ActFormat act, int64_t in_features) noexcept {
  switch (act) {
    case ActFormat::kF32:
      return 0;
    case ActFormat::kInt8G32:
      return quantized_row_bytes(in_features, most_sums(false));
    case ActFormat::kInt8G32Halves:
      return quantized_row_bytes(in_features, most_sums(true));
    case ActFormat::kInt16G128:
      return int16_row_bytes(in_features);
    case ActFormat::kBf16:
      return split_row_bytes(1, in_features);
    case ActFormat::kBf16x2:
      return split_row_bytes(2, in_features);
  }
  return 0;
}

// Columns that share a scale: `quantize` is called with multiples of it, but for the end of a row.
constexpr int64_t act_group(ActFormat act) noexcept {
  switch (act) {
    case ActFormat::kF32:
      return 1;
    case ActFormat::kInt8G32:
    case ActFormat::kInt8G32Halves:
      return format::kGroup;
    case ActFormat::kInt16G128:
      return kInt16Group;
    case ActFormat::kBf16:
    case ActFormat::kBf16x2:
      return kSplitColumns;
  }
  return 1;
}

// Whether rows are int8 in one plane or two (act_budget.h).
constexpr bool has_planes(ActFormat act) noexcept {
  return act == ActFormat::kInt8G32 || act == ActFormat::kInt8G32Halves || act == ActFormat::kInt16G128;
}

// Whether the cells of several tokens read rows that stand at one distance where they are. All others, and
// all cells when rows are given by index, copy them next to each other for every row tile first.
constexpr bool reads_in_place(ActFormat act) noexcept {
  return act != ActFormat::kF32 && act != ActFormat::kInt8G32Halves;
}

}  // namespace proa::gemm
