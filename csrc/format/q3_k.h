// q3_k: GGUF blocks of type Q3_K; value = (code - 4) * d * (scale - 32), 6-bit scale per 16 columns.
// It takes a byte here: 114 bytes per 256 weights, 110 in the file, for cells that load it instead of putting
// bits together.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

struct Q3_K : GgmlFormat<Q3_K, ggml::Q3_K> {
  static constexpr WeightFormat kFormat = WeightFormat::kQ3K;
  static constexpr const char* kName = "q3_k";
  static constexpr int kBits = 3;
  static constexpr int kOffset = 4;
  static constexpr int64_t kColumns = 256;
  static constexpr int64_t kScaleColumns = 16;
  static constexpr ScaleKind kScale = ScaleKind::kSub;
  static constexpr bool kMinimum = false;

  static void read_scales(const ggml::Block<256>& block, int64_t, GroupedRow<Q3_K>& out) noexcept {
    out.d = block.d;
    for (int i = 0; i < 16; ++i) out.scales[i] = static_cast<uint8_t>(block.scales[i] - 32);
  }
};

}  // namespace proa::format
