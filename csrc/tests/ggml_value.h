// The value of an element of a weight that is stored as GGUF blocks. The blocks themselves are compared with
// the gguf package's in tests/kernels/test_ggml.py.
#pragma once

#include <cmath>

#include "base/scalar.h"
#include "format/ggml_blocks.h"
#include "tests/random_weight.h"

namespace proa::test {

// value(block, element of the block) of element (i, k).
template <class Type, class Value>
float block_value(const CheckpointWeight& source, int64_t i, int64_t k, Value value) {
  const int64_t blocks = source.shape.in_features / Type::kElements;
  format::ggml::Block<Type::kElements> block;
  Type::read(reinterpret_cast<const uint8_t*>(source.data.data()) +
                 (i * blocks + k / Type::kElements) * Type::kBytes,
             block);
  return value(block, k % Type::kElements);
}

// NaN for a format that does not come as blocks alone.
inline float ggml_value(format::WeightFormat weight, const CheckpointWeight& source, int64_t i, int64_t k) {
  using format::WeightFormat;
  namespace ggml = format::ggml;
  const auto d = [](const auto& b) { return base::fp16_to_f32(b.d); };
  const auto m = [](const auto& b) { return base::fp16_to_f32(b.min); };
  const auto code = [](const auto& b, int64_t e) { return static_cast<float>(b.codes[e]); };
  const auto with_minimum = [&](const auto& b, int64_t e) { return code(b, e) * d(b) + m(b); };
  const auto with_sub_minimum = [&](const auto& b, int64_t e) {
    return code(b, e) * d(b) * b.scales[e / 32] - m(b) * b.mins[e / 32];
  };
  switch (weight) {
    case WeightFormat::kQ4_1:
      return block_value<ggml::Q4_1>(source, i, k, with_minimum);
    case WeightFormat::kQ5_1:
      return block_value<ggml::Q5_1>(source, i, k, with_minimum);
    case WeightFormat::kQ4K:
      return block_value<ggml::Q4_K>(source, i, k, with_sub_minimum);
    case WeightFormat::kQ5K:
      return block_value<ggml::Q5_K>(source, i, k, with_sub_minimum);
    case WeightFormat::kIq4Nl: {
      constexpr float kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
      return block_value<ggml::Iq4Nl>(source, i, k,
                                      [&](const auto& b, int64_t e) { return kValues[b.codes[e]] * d(b); });
    }
    case WeightFormat::kQ5_0:
      return block_value<ggml::Q5_0>(source, i, k,
                                     [&](const auto& b, int64_t e) { return (code(b, e) - 16.0f) * d(b); });
    case WeightFormat::kQ2K:
      return block_value<ggml::Q2_K>(source, i, k, [&](const auto& b, int64_t e) {
        return code(b, e) * d(b) * (b.scales[e / 16] & 15) - m(b) * (b.scales[e / 16] >> 4);
      });
    case WeightFormat::kQ3K:
      return block_value<ggml::Q3_K>(source, i, k, [&](const auto& b, int64_t e) {
        return (code(b, e) - 4.0f) * d(b) * (b.scales[e / 16] - 32);
      });
    case WeightFormat::kQ6K:
      return block_value<ggml::Q6_K>(source, i, k, [&](const auto& b, int64_t e) {
        return (code(b, e) - 32.0f) * d(b) * static_cast<int8_t>(b.scales[e / 16]);
      });
    default:
      return NAN;
  }
}

}  // namespace proa::test
