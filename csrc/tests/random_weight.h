// Random checkpoint weights for the tests of packing, kernels and experts.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "base/scalar.h"
#include "format/weight_format.h"

namespace proa::test {

using Rng = std::mt19937;

inline int64_t pick(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

inline std::vector<float> random_floats(Rng& rng, int64_t n, float std = 1.0f) {
  std::normal_distribution<float> normal(0.0f, std);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = normal(rng);
  return values;
}

template <class T>
std::vector<std::byte> bytes_of(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Owns the arrays of a format::RawWeight.
struct CheckpointWeight {
  format::Shape shape;
  std::vector<std::byte> data, scales;

  format::RawWeight raw() const { return {shape, data.data(), scales.data()}; }
};

inline std::vector<std::byte> random_bf16(Rng& rng, int64_t n, float std) {
  std::vector<uint16_t> bits;
  for (float value : random_floats(rng, n, std)) bits.push_back(base::f32_to_bf16(value));
  return bytes_of(bits);
}

inline CheckpointWeight random_weight(Rng& rng, format::WeightFormat weight, format::Shape shape) {
  using format::WeightFormat;
  const int64_t n = shape.out_features * shape.in_features;
  CheckpointWeight result{shape, {}, {}};
  const auto random_bytes = [&](int64_t count) {
    std::vector<uint8_t> bytes;
    for (int64_t i = 0; i < count; ++i) {
      auto byte = static_cast<uint8_t>(rng());
      if (weight == WeightFormat::kFp8Block128 && (byte & 0x7f) == 0x7f) byte = 0;
      bytes.push_back(byte);
    }
    return bytes_of(bytes);
  };
  const auto ceil = [](int64_t m) { return (m + format::kFp8Block - 1) / format::kFp8Block; };
  switch (weight) {
    case WeightFormat::kF32:
      result.data = bytes_of(random_floats(rng, n));
      break;
    case WeightFormat::kBf16:
      result.data = random_bf16(rng, n, 1.0f);
      break;
    case WeightFormat::kInt4G32:
      result.data = random_bytes(n / 2);
      result.scales = random_bf16(rng, n / format::kInt4Group, 0.1f);
      break;
    case WeightFormat::kFp8Block128:
      result.data = random_bytes(n);
      result.scales = bytes_of(random_floats(rng, ceil(shape.out_features) * ceil(shape.in_features), 0.01f));
      break;
  }
  return result;
}

// 64-byte aligned, as kernels want it.
class PackedMemory {
 public:
  PackedMemory(format::WeightFormat weight, const CheckpointWeight& source)
      : storage_(static_cast<size_t>(format::packed_bytes(weight, source.shape)) + 64) {
    void* start = storage_.data();
    size_t space = storage_.size();
    bytes_ = {static_cast<std::byte*>(std::align(64, space - 64, start, space)), storage_.size() - 64};
    format::pack_panels(weight, source.raw(), bytes_, 0, source.shape.panels());
  }
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::vector<std::byte> storage_;
  std::span<std::byte> bytes_;
};

}  // namespace proa::test
