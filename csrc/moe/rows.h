// What the two halves of an expert layer do with rows of a linear or of its results.
#pragma once

#include <cstdint>

#include "gemm/kernel.h"
#include "moe/expert_weights.h"
#include "moe/tiles.h"

namespace proa::moe {

inline void add(float* sum, const float* row, int64_t n) noexcept {
  for (int64_t r = 0; r < n; ++r) sum[r] += row[r];
}

// out[m * rows + r] = row `row` + r of the linear times x[m].
inline void multiply_rows(const gemm::Kernel& kernel, const ExpertWeights::Linear& linear, int64_t row,
                          int64_t rows, const gemm::ActRows& x, int64_t tokens, float* out) noexcept {
  kernel.gemm({linear.data, linear.shape, row / format::kPanelRows, ceil_div(row + rows, format::kPanelRows),
               x, tokens, out, rows});
}

}  // namespace proa::moe
