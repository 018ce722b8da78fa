// Where the parts of a packed weight stand that the loops of all cells need.
#pragma once

#include <algorithm>
#include <cstdint>

#include "format/fp8_block128.h"
#include "gemm/kernel.h"

namespace proa::gemm {

// Rows of `panel` that are outputs, not padding.
inline int valid_rows(const GemmArgs& args, int64_t panel) noexcept {
  return static_cast<int>(std::min(format::kPanelRows, args.shape.out_features - panel * format::kPanelRows));
}

// fp8: the scale of each 128 columns of `panel`.
inline const float* fp8_scales(const GemmArgs& args, int64_t panel) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t bytes = format::ceil_div(format::fp8_block128::panel_bytes(in), 64) * 64;
  return format::fp8_block128::block_scales(args.weight + panel * bytes, in);
}

}  // namespace proa::gemm
