// What the grouped formats that come as GGUF blocks alone have in common.
#pragma once

#include <algorithm>

#include "format/ggml_blocks.h"
#include "format/grouped.h"

namespace proa::format {

// Block `index` of a row of GGUF blocks.
template <class Type>
inline const uint8_t* ggml_block(const RawWeight& raw, int64_t row, int64_t index) noexcept {
  const int64_t row_bytes = raw.shape.in_features / Type::kElements * Type::kBytes;
  return static_cast<const uint8_t*>(raw.data) + row * row_bytes + index * Type::kBytes;
}

template <class Type>
inline RawSpec ggml_spec(const Shape& shape) noexcept {
  return {matrix(Element::kBlocks, shape.out_features, shape.in_features / Type::kElements * Type::kBytes),
          {}};
}

// Base of a format F (grouped.h) whose rows are blocks of `Type`. F has what differs:
// static void read_scales(const ggml::Block<..>&, int64_t block of the super-block, GroupedRow<F>&).
template <class F, class Type>
struct GgmlFormat {
  static constexpr CodeKind kCodes = CodeKind::kLinear;
  static constexpr bool kRowScale = false;
  static constexpr int64_t kStep = Type::kElements;
  static constexpr const char* kReject = Type::kElements == 256
                                             ? "in_features is not a multiple of the block of 256"
                                             : "in_features is not a multiple of the block of 32";

  static RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
    return layout == RawLayout::kGgml ? ggml_spec<Type>(shape) : RawSpec{};
  }

  template <class Row>
  static void read(const RawWeight& raw, int64_t row, int64_t super, int64_t groups, Row& out) noexcept {
    constexpr int64_t kBlockGroups = Type::kElements / kGroup;
    ggml::Block<Type::kElements> block;
    for (int64_t b = 0; b < groups / kBlockGroups; ++b) {
      Type::read(ggml_block<Type>(raw, row, super * (F::kColumns / Type::kElements) + b), block);
      for (int64_t g = 0; g < kBlockGroups; ++g)
        words_from_codes<F::kBits>(block.codes + g * kGroup, out.words[b * kBlockGroups + g]);
      F::read_scales(block, b, out);
    }
  }
};

}  // namespace proa::format
