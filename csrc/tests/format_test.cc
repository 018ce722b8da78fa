// Packing and unpacking of every format, against what the checkpoint bytes mean.
#include <bit>
#include <cmath>

#include "tests/check.h"
#include "tests/ggml_value.h"
#include "tests/random_weight.h"

namespace {

using namespace proa;
using format::WeightFormat;

int nibble(const test::CheckpointWeight& source, int64_t i, int64_t k) {
  const auto byte =
      static_cast<int>(source.data[static_cast<size_t>((i * source.shape.in_features + k) / 2)]);
  return byte >> (k % 2 * 4) & 0x0f;
}

float int4_value(const test::CheckpointWeight& source, int64_t i, int64_t k) {
  return static_cast<float>(nibble(source, i, k) - 8);
}

float e2m1_value(const test::CheckpointWeight& source, int64_t i, int64_t k) {
  constexpr float kValues[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const int code = nibble(source, i, k);
  return code < 8 ? kValues[code] : -kValues[code - 8];
}

// The 16 bits of the scale of a group of columns.
uint16_t scale16(const test::CheckpointWeight& source, int64_t i, int64_t k, int64_t group) {
  const auto* scales = reinterpret_cast<const uint16_t*>(source.scales.data());
  return scales[i * (source.shape.in_features / group) + k / group];
}

// The value of element (i, k), straight from the checkpoint bytes.
float checkpoint_value(WeightFormat weight, const test::CheckpointWeight& source, int64_t i, int64_t k) {
  const auto [out, in] = source.shape;
  (void)out;
  const auto* bytes = reinterpret_cast<const uint8_t*>(source.data.data());
  const auto* words = reinterpret_cast<const uint16_t*>(source.data.data());
  switch (weight) {
    case WeightFormat::kF32:
      return reinterpret_cast<const float*>(bytes)[i * in + k];
    case WeightFormat::kBf16:
      return base::bf16_to_f32(words[i * in + k]);
    case WeightFormat::kF16:
      return base::fp16_to_f32(words[i * in + k]);
    case WeightFormat::kInt4G32:
      return int4_value(source, i, k) * base::bf16_to_f32(scale16(source, i, k, 32));
    case WeightFormat::kInt4G64:
      return int4_value(source, i, k) * base::bf16_to_f32(scale16(source, i, k, 64));
    case WeightFormat::kInt4G128:
      return int4_value(source, i, k) * base::bf16_to_f32(scale16(source, i, k, 128));
    case WeightFormat::kInt4G32F16:
      return int4_value(source, i, k) * base::fp16_to_f32(scale16(source, i, k, 32));
    case WeightFormat::kInt4G64F16:
      return int4_value(source, i, k) * base::fp16_to_f32(scale16(source, i, k, 64));
    case WeightFormat::kInt4G128F16:
      return int4_value(source, i, k) * base::fp16_to_f32(scale16(source, i, k, 128));
    case WeightFormat::kInt8G32F16:
      return static_cast<float>(static_cast<int8_t>(bytes[i * in + k])) *
             base::fp16_to_f32(scale16(source, i, k, 32));
    case WeightFormat::kNvFp4: {
      const auto scale = static_cast<uint8_t>(source.scales[static_cast<size_t>(i * (in / 16) + k / 16)]);
      return e2m1_value(source, i, k) * base::fp8_e4m3_to_f32(scale) * source.global_scale;
    }
    case WeightFormat::kMxFp4: {
      const auto e = static_cast<int>(source.scales[static_cast<size_t>(i * (in / 32) + k / 32)]);
      return std::ldexp(e2m1_value(source, i, k), e - 127);
    }
    case WeightFormat::kFp8Block128: {
      const auto* scales = reinterpret_cast<const float*>(source.scales.data());
      return base::fp8_e4m3_to_f32(bytes[i * in + k]) * scales[i / 128 * ((in + 127) / 128) + k / 128];
    }
    case WeightFormat::kFp8Channel:
      return base::fp8_e4m3_to_f32(bytes[i * in + k]) *
             reinterpret_cast<const float*>(source.scales.data())[i];
    case WeightFormat::kMxFp8: {
      const auto e = static_cast<int>(source.scales[static_cast<size_t>(i * (in / 32) + k / 32)]);
      return std::ldexp(base::fp8_e4m3_to_f32(bytes[i * in + k]), e - 127);
    }
    case WeightFormat::kInt8G128: {
      const auto* scales = reinterpret_cast<const uint16_t*>(source.scales.data());
      return static_cast<float>(static_cast<int8_t>(bytes[i * in + k])) *
             base::bf16_to_f32(scales[i * ((in + 127) / 128) + k / 128]);
    }
    default:
      return test::ggml_value(weight, source, i, k);  // NaN equals nothing: a format needs its line
  }
}

void round_trip(WeightFormat weight, format::Shape shape, test::Rng& rng) {
  const auto source = test::random_weight(rng, weight, shape);
  const test::PackedMemory packed(weight, source);
  std::vector<float> values(static_cast<size_t>(shape.out_features * shape.in_features));
  format::unpack(weight, shape, packed.bytes(), values);
  int64_t different = 0;
  for (int64_t i = 0; i < shape.out_features; ++i)
    for (int64_t k = 0; k < shape.in_features; ++k)
      different +=
          values[static_cast<size_t>(i * shape.in_features + k)] != checkpoint_value(weight, source, i, k);
  CHECK_EQ(different, 0);
}

// Panels may be packed one by one in any order.
void pieces_equal_whole(WeightFormat weight, test::Rng& rng) {
  const auto source = test::random_weight(rng, weight, {300, 512});
  const test::PackedMemory whole(weight, source), pieces(weight, source);
  std::memset(pieces.bytes().data(), 0x55, pieces.bytes().size());
  for (int64_t panel = source.shape.panels() - 1; panel >= 0; --panel)
    format::pack_panels(weight, source.raw(), pieces.bytes(), panel, panel + 1);
  std::vector<float> a(300 * 512), b(300 * 512);
  format::unpack(weight, source.shape, whole.bytes(), a);
  format::unpack(weight, source.shape, pieces.bytes(), b);
  CHECK(a == b);
}

void int4_layout() {
  // Row 0 holds -8 .. 7 twice, row 1 is constant: the packed block is the diagram of format/grouped.h.
  test::CheckpointWeight source{{2, 32}, std::vector<std::byte>(32), std::vector<std::byte>(4)};
  for (int i = 0; i < 16; ++i) {
    source.data[static_cast<size_t>(i)] = static_cast<std::byte>((2 * i + 1) % 16 << 4 | (2 * i) % 16);
    source.data[static_cast<size_t>(16 + i)] = std::byte{0x99};
  }
  const test::PackedMemory packed(WeightFormat::kInt4G32, source);
  uint32_t words[16];
  std::memcpy(words, packed.bytes().data(), 64);
  CHECK_EQ(words[0], 0x76543210u);
  CHECK_EQ(words[1], 0x99999999u);
  CHECK_EQ(words[2], 0x88888888u);
  std::memcpy(words, packed.bytes().data() + 64, 64);
  CHECK_EQ(words[0], 0xfedcba98u);
}

void names() {
  for (int i = 0; i < format::kNumFormats; ++i) {
    const auto weight = static_cast<WeightFormat>(i);
    CHECK(format::parse_format(format::format_name(weight)) == weight);
  }
  CHECK(!format::parse_format("int4"));
}

}  // namespace

int main() {
  test::Rng rng(1);
  for (const WeightFormat weight : test::packable_formats()) {
    int packed = 0;
    for (format::Shape shape : {format::Shape{1, 1},
                                {16, 4},
                                {17, 3},
                                {130, 129},
                                {257, 300},
                                {1, 32},
                                {33, 96},
                                {130, 320},
                                {33, 128},
                                {16, 64},
                                {257, 640},
                                {33, 768}}) {
      if (format::format_info(weight).reject(shape) != nullptr) continue;
      round_trip(weight, shape, rng);
      ++packed;
    }
    CHECK(packed >= 1);
    pieces_equal_whole(weight, rng);
  }
  int4_layout();
  names();
  return test::result();
}
