// Where the parts of a packed weight stand that the loops of all cells need.
#pragma once

#include <algorithm>
#include <cstdint>

#include "format/fp8_block128.h"
#include "gemm/kernel.h"

namespace proa::gemm {

// Where the scales of a float cell come in: when columns become floats (or nowhere), once per 128 columns, or
// once per row at the end.
enum class Scaling : uint8_t { kInColumns, kPerBlock, kPerRow };

// Rows of `panel` that are outputs, not padding.
inline int valid_rows(const GemmArgs& args, int64_t panel) noexcept {
  return static_cast<int>(std::min(format::kPanelRows, args.shape.out_features - panel * format::kPanelRows));
}

// fp8_block128: the scale of each 128 columns of `panel`.
inline const float* fp8_scales(const GemmArgs& args, int64_t panel) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t bytes = format::ceil_div(format::fp8_block128::panel_bytes(in), 64) * 64;
  return format::fp8_block128::block_scales(args.weight + panel * bytes, in);
}

}  // namespace proa::gemm
