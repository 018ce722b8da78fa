// Where the parts of a packed weight stand that the loops of all cells need.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gemm/kernel.h"

namespace proa::gemm {

// Rows of `panel` that are outputs, not padding.
inline int valid_rows(const GemmArgs& args, int64_t panel) noexcept {
  return static_cast<int>(std::min(format::kPanelRows, args.shape.out_features - panel * format::kPanelRows));
}

// fp8: the scale of each 128 columns of `panel`.
inline const float* fp8_scales(const GemmArgs& args, int64_t panel) noexcept {
  const auto* scales = reinterpret_cast<const float*>(args.weight + format::fp8_scales_offset(args.shape));
  const int64_t blocks = (args.shape.in_features + format::kFp8Block - 1) / format::kFp8Block;
  return scales + panel / (format::kFp8Block / format::kPanelRows) * blocks;
}

}  // namespace proa::gemm
