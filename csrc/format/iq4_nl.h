// iq4_nl: GGUF blocks of type IQ4_NL; value = d * entry of a table (kIq4NlCodes), of 32 columns each.
#pragma once

#include "format/ggml_grouped.h"

namespace proa::format {

struct Iq4Nl : GgmlFormat<Iq4Nl, ggml::Iq4Nl> {
  static constexpr WeightFormat kFormat = WeightFormat::kIq4Nl;
  static constexpr const char* kName = "iq4_nl";
  static constexpr int kBits = 4;
  static constexpr CodeKind kCodes = CodeKind::kIq4Nl;
  static constexpr int kOffset = kIq4NlOffset;
  static constexpr int64_t kColumns = 32;
  static constexpr int64_t kScaleColumns = 32;
  static constexpr ScaleKind kScale = ScaleKind::kF16;
  static constexpr bool kMinimum = false;

  static void read_scales(const ggml::Block<32>& block, int64_t b, GroupedRow<Iq4Nl>& out) noexcept {
    out.scales[b] = block.d;
  }
};

}  // namespace proa::format
