// Random checkpoint weights for the tests of packing, kernels and experts.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "base/scalar.h"
#include "format/format_info.h"

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
  float global_scale = 1.0f;
  format::RawLayout layout = format::RawLayout::kRows;

  format::RawWeight raw() const { return {shape, data.data(), scales.data(), global_scale, layout}; }
};

inline std::vector<std::byte> random_bf16(Rng& rng, int64_t n, float std) {
  std::vector<uint16_t> bits;
  for (float value : random_floats(rng, n, std)) bits.push_back(base::f32_to_bf16(value));
  return bytes_of(bits);
}

// Signs and exponents 2^-14 .. 2^0.
inline std::vector<std::byte> random_f16(Rng& rng, int64_t n) {
  std::vector<uint16_t> bits;
  for (int64_t i = 0; i < n; ++i)
    bits.push_back(static_cast<uint16_t>((rng() & 0x83ffu) | static_cast<uint32_t>(pick(rng, 1, 15)) << 10));
  return bytes_of(bits);
}

inline std::vector<std::byte> random_codes(Rng& rng, int64_t n, format::Element element) {
  std::vector<uint8_t> bytes;
  for (int64_t i = 0; i < n; ++i) {
    auto byte = static_cast<uint8_t>(rng());
    if (element == format::Element::kE4m3 && (byte & 0x7f) == 0x7f) byte = 0;
    if (element == format::Element::kE8m0) byte = static_cast<uint8_t>(pick(rng, 115, 130));
    bytes.push_back(byte);
  }
  return bytes_of(bytes);
}

// Finite elements of any sign; floats have the standard deviation `std`.
inline std::vector<std::byte> random_array(Rng& rng, const format::ArraySpec& spec, float std) {
  using format::Element;
  int64_t n = 1;
  for (int i = 0; i < spec.rank; ++i) n *= spec.size[i];
  switch (spec.element) {
    case Element::kNone:
      return {};
    case Element::kF32:
      return bytes_of(random_floats(rng, n, std));
    case Element::kBf16:
      return random_bf16(rng, n, std);
    case Element::kF16:
      return random_f16(rng, n);
    default:
      return random_codes(rng, n, spec.element);
  }
}

// The formats that can be packed.
inline std::vector<format::WeightFormat> packable_formats() {
  std::vector<format::WeightFormat> formats;
  for (int i = 0; i < format::kNumFormats; ++i) {
    const auto weight = static_cast<format::WeightFormat>(i);
    if (format::format_info(weight).pack_panel != nullptr) formats.push_back(weight);
  }
  return formats;
}

// The fp16 numbers of a GGUF block of a format that has no other layout.
struct BlockHalves {
  int64_t block_bytes;
  std::vector<int64_t> offsets;
};

inline BlockHalves block_halves(format::WeightFormat weight) {
  using format::WeightFormat;
  switch (weight) {
    case WeightFormat::kQ4_1:
      return {20, {0, 2}};
    case WeightFormat::kIq4Nl:
      return {18, {0}};
    case WeightFormat::kQ5_0:
      return {22, {0}};
    case WeightFormat::kQ5_1:
      return {24, {0, 2}};
    case WeightFormat::kQ2K:
      return {84, {80, 82}};
    case WeightFormat::kQ3K:
      return {110, {108}};
    case WeightFormat::kQ4K:
      return {144, {0, 2}};
    case WeightFormat::kQ5K:
      return {176, {0, 2}};
    case WeightFormat::kQ6K:
      return {210, {208}};
    default:
      return {1, {}};
  }
}

// Any bytes, but finite fp16 numbers.
inline CheckpointWeight random_blocks(Rng& rng, format::WeightFormat weight, format::Shape shape) {
  const auto spec = format::format_info(weight).raw_spec(shape, format::RawLayout::kGgml);
  CheckpointWeight result{shape, random_array(rng, spec.data, 1.0f), {}, 1.0f, format::RawLayout::kGgml};
  const BlockHalves halves = block_halves(weight);
  const int64_t blocks = static_cast<int64_t>(result.data.size()) / halves.block_bytes;
  for (const int64_t offset : halves.offsets) {
    const auto numbers = random_f16(rng, blocks);
    for (int64_t b = 0; b < blocks; ++b)
      std::memcpy(result.data.data() + b * halves.block_bytes + offset, numbers.data() + 2 * b, 2);
  }
  return result;
}

// Layout kRows where the format has it.
inline CheckpointWeight random_weight(Rng& rng, format::WeightFormat weight, format::Shape shape) {
  const format::FormatInfo& info = format::format_info(weight);
  const format::RawSpec spec = info.raw_spec(shape, format::RawLayout::kRows);
  if (spec.data.element == format::Element::kNone) return random_blocks(rng, weight, shape);
  return {shape, random_array(rng, spec.data, 1.0f), random_array(rng, spec.scales, 0.1f),
          info.has_global_scale ? 0.37f : 1.0f};
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
