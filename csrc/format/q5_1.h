// q5_1: GGUF blocks of type Q5_1; value = code * d + m, of 32 columns each.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

struct Q5_1 : GgmlFormat<Q5_1, ggml::Q5_1> {
  static constexpr WeightFormat kFormat = WeightFormat::kQ5_1;
  static constexpr const char* kName = "q5_1";
  static constexpr int kBits = 5;
  static constexpr int kOffset = 0;
  static constexpr int64_t kColumns = 32;
  static constexpr int64_t kScaleColumns = 32;
  static constexpr ScaleKind kScale = ScaleKind::kF16;
  static constexpr bool kMinimum = true;

  static void read_scales(const ggml::Block<32>& block, int64_t b, GroupedRow<Q5_1>& out) noexcept {
    out.scales[b] = block.d;
    out.mins[b] = block.min;
  }
};

}  // namespace proa::format
