// q5_0: GGUF blocks of type Q5_0; value = (code - 16) * d, one d per 32 columns.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

struct Q5_0 : GgmlFormat<Q5_0, ggml::Q5_0> {
  static constexpr WeightFormat kFormat = WeightFormat::kQ5_0;
  static constexpr const char* kName = "q5_0";
  static constexpr int kBits = 5;
  static constexpr int kOffset = 16;
  static constexpr int64_t kColumns = 64;  // 704 bytes: whole cache lines
  static constexpr int64_t kScaleColumns = 32;
  static constexpr ScaleKind kScale = ScaleKind::kF16;
  static constexpr bool kMinimum = false;

  static void read_scales(const ggml::Block<32>& block, int64_t b, GroupedRow<Q5_0>& out) noexcept {
    out.scales[b] = block.d;
  }
};

}  // namespace proa::format
