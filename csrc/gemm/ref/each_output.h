// The loop over tokens and rows that the scalar cells share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm/kernel.h"

namespace proa::gemm::ref {

// Dot: float dot(const std::byte* panel, int64_t row in the matrix, const std::byte* activation row).
template <class Dot>
void each_output(const GemmArgs& args, format::WeightFormat weight, Dot dot) noexcept {
  const int64_t panel_bytes = format::panel_bytes(weight, args.shape.in_features);
  const int64_t first_row = args.panel_begin * format::kPanelRows;
  const int64_t end_row = std::min(args.panel_end * format::kPanelRows, args.shape.out_features);
  for (int64_t m = 0; m < args.num_tokens; ++m) {
    const std::byte* x = args.x.row(m);
    for (int64_t row = first_row; row < end_row; ++row)
      args.out[m * args.out_stride + row - first_row] =
          dot(args.weight + row / format::kPanelRows * panel_bytes, row, x);
  }
}

}  // namespace proa::gemm::ref
