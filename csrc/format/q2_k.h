// q2_k: GGUF blocks of type Q2_K; value = code * d * scale - dmin * min, 4-bit scale and min per 16 columns.
// They share a byte, as in the file.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

struct Q2_K : GgmlFormat<Q2_K, ggml::Q2_K> {
  static constexpr WeightFormat kFormat = WeightFormat::kQ2K;
  static constexpr const char* kName = "q2_k";
  static constexpr int kBits = 2;
  static constexpr int kOffset = 0;
  static constexpr int64_t kColumns = 256;
  static constexpr int64_t kScaleColumns = 16;
  static constexpr ScaleKind kScale = ScaleKind::kSubPair;
  static constexpr bool kMinimum = true;

  static void read_scales(const ggml::Block<256>& block, int64_t, GroupedRow<Q2_K>& out) noexcept {
    out.d = block.d;
    out.dmin = block.min;
    std::copy_n(block.scales, 16, out.scales);
  }
};

}  // namespace proa::format
