// q4_1: GGUF blocks of type Q4_1; value = code * d + m, of 32 columns each.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

struct Q4_1 : GgmlFormat<Q4_1, ggml::Q4_1> {
  static constexpr WeightFormat kFormat = WeightFormat::kQ4_1;
  static constexpr const char* kName = "q4_1";
  static constexpr int kBits = 4;
  static constexpr int kOffset = 0;
  static constexpr int64_t kColumns = 32;
  static constexpr int64_t kScaleColumns = 32;
  static constexpr ScaleKind kScale = ScaleKind::kF16;
  static constexpr bool kMinimum = true;

  static void read_scales(const ggml::Block<32>& block, int64_t b, GroupedRow<Q4_1>& out) noexcept {
    out.scales[b] = block.d;
    out.mins[b] = block.min;
  }
};

}  // namespace proa::format
