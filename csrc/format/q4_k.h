// q4_k: GGUF blocks of type Q4_K; value = code * d * scale - dmin * min, 6-bit scale and min per 32 columns.
// They take a byte each here: 148 bytes per 256 weights, 144 in the file.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

struct Q4_K : GgmlFormat<Q4_K, ggml::Q4_K> {
  static constexpr WeightFormat kFormat = WeightFormat::kQ4K;
  static constexpr const char* kName = "q4_k";
  static constexpr int kBits = 4;
  static constexpr int kOffset = 0;
  static constexpr int64_t kColumns = 256;
  static constexpr int64_t kScaleColumns = 32;
  static constexpr ScaleKind kScale = ScaleKind::kSub;
  static constexpr bool kMinimum = true;

  static void read_scales(const ggml::Block<256>& block, int64_t, GroupedRow<Q4_K>& out) noexcept {
    out.d = block.d;
    out.dmin = block.min;
    std::copy_n(block.scales, 8, out.scales);
    std::copy_n(block.mins, 8, out.mins);
  }
};

}  // namespace proa::format
