// int8_g32_f16: signed 8-bit weights q, one fp16 scale per row and 32 columns; value = q * scale. Stored as
// u = q + 128, which is what unsigned dot products take.
//
// Rows: q int8 [out, in]; scales uint16 (fp16) [out, in/32]. Also GGUF blocks of type Q8_0.
#pragma once

#include "format/ggml_grouped.h"
#include "format/int4.h"

namespace proa::format {

struct Int8G32F16 {
  static constexpr WeightFormat kFormat = WeightFormat::kInt8G32F16;
  static constexpr const char* kName = "int8_g32_f16";
  static constexpr int kBits = 8;
  static constexpr CodeKind kCodes = CodeKind::kLinear;
  static constexpr int kOffset = 128;
  static constexpr int64_t kColumns = 64;  // 1088 bytes: whole cache lines
  static constexpr int64_t kScaleColumns = 32;
  static constexpr ScaleKind kScale = ScaleKind::kF16;
  static constexpr bool kMinimum = false;
  static constexpr bool kRowScale = false;
  static constexpr int64_t kStep = 32;
  static constexpr const char* kReject = "in_features is not a multiple of the group of 32";

  static RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
    if (layout == RawLayout::kGgml) return ggml_spec<ggml::Q8_0>(shape);
    return {matrix(Element::kInt8, shape.out_features, shape.in_features),
            matrix(Element::kF16, shape.out_features, shape.in_features / 32)};
  }

  static void read(const RawWeight& raw, int64_t row, int64_t super, int64_t groups,
                   GroupedRow<Int8G32F16>& out) noexcept {
    const int64_t in = raw.shape.in_features;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t group = super * (kColumns / kGroup) + g;
      ggml::Block<kGroup> block;
      if (raw.layout == RawLayout::kGgml) {
        ggml::Q8_0::read(ggml_block<ggml::Q8_0>(raw, row, group), block);
      } else {
        std::memcpy(block.codes, static_cast<const uint8_t*>(raw.data) + row * in + group * kGroup, kGroup);
        block.d = static_cast<const uint16_t*>(raw.scales)[row * (in / kGroup) + group];
      }
      for (uint8_t& code : block.codes) code ^= 0x80;
      words_from_codes<kBits>(block.codes, out.words[g]);
      out.scales[g] = block.d;
    }
  }
};

}  // namespace proa::format
