// q6_k: GGUF blocks of type Q6_K; value = (code - 32) * d * scale, int8 scale per 16 columns.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

struct Q6_K : GgmlFormat<Q6_K, ggml::Q6_K> {
  static constexpr WeightFormat kFormat = WeightFormat::kQ6K;
  static constexpr const char* kName = "q6_k";
  static constexpr int kBits = 6;
  static constexpr int kOffset = 32;
  static constexpr int64_t kColumns = 256;
  static constexpr int64_t kScaleColumns = 16;
  static constexpr ScaleKind kScale = ScaleKind::kSub;
  static constexpr bool kMinimum = false;

  static void read_scales(const ggml::Block<256>& block, int64_t, GroupedRow<Q6_K>& out) noexcept {
    out.d = block.d;
    std::copy_n(block.scales, 16, out.scales);
  }
};

}  // namespace proa::format
