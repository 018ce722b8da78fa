// f32 activations as one bf16 term (ActFormat::kBf16) or the sum of two (kBf16x2), for cells that multiply
// bf16 tiles.
//
//   row, per 32 columns:   term 0 bf16 [32] | term 1 bf16 [32], if any   (padded with zeros to whole 32)
//
//   term 0 = bf16(x), x within 2^-8 |x|; term 1 = bf16(x - term 0), the sum is x within 2^-16 |x|; both to
//   nearest even. Magnitudes below 2^-126 count as 0. Where term 0 is infinite or NaN (|x| of 2^128 - 2^119
//   or more), term 1 is 0.
#pragma once

#include <cstdint>

#include "gemm/row_stride.h"

namespace proa::gemm {

inline constexpr int64_t kMaxSplitTerms = 2;
inline constexpr int64_t kSplitColumns = 32;
inline constexpr int64_t kSplitTermBytes = 2 * kSplitColumns;

// In a tiled block (gemm::ActRows) line i of row m stands here.
constexpr int64_t split_block_offset(int64_t line, int64_t m) noexcept { return 64 * (16 * line + m); }

constexpr int64_t split_row_bytes(int64_t terms, int64_t in_features) noexcept {
  return spread_row_bytes((in_features + kSplitColumns - 1) / kSplitColumns * terms * kSplitTermBytes);
}

}  // namespace proa::gemm
