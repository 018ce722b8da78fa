// int8_g128 and its 16-bit activations: the scalar cell against float64, every cell this CPU can run against
// the scalar one, bit by bit.
#include <cmath>
#include <limits>

#include "gemm/int16_act.h"
#include "gemm/kernel.h"
#include "tests/check.h"
#include "tests/kernel_case.h"
#include "tests/random_weight.h"

namespace {

using namespace proa;
using test::Case;

constexpr auto kWeight = format::WeightFormat::kInt8G128;

// The cells other than the scalar one.
std::vector<const gemm::Kernel*> cells() {
  std::vector<const gemm::Kernel*> result;
  for (const gemm::Kernel* kernel : gemm::all_kernels())
    if (kernel->weight == kWeight && kernel->act == gemm::ActFormat::kInt16G128 && test::runnable(*kernel))
      result.push_back(kernel);
  return result;
}

// x as the activations hold it, by the definition of gemm/int16_act.h.
std::vector<float> rounded(std::vector<float> x, float fine_above) {
  for (size_t k = 0; k < x.size(); k += 128) {
    const size_t end = std::min(x.size(), k + 128);
    float largest = 0.0f;
    for (size_t i = k; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
    const float d = largest / (largest > fine_above ? 32512.0f : 127.0f);
    for (size_t i = k; i < end; ++i) x[i] = d == 0.0f ? 0.0f : std::nearbyint(x[i] / d) * d;
  }
  return x;
}

// Within (groups + 3) eps sum |w x|: a conversion, a product of scales and a sum per group.
void scalar_is_right(test::Rng& rng, int64_t in, test::Fine fine) {
  const format::Shape shape{40, in};
  const auto source = test::random_weight(rng, kWeight, shape);
  const test::PackedMemory packed(kWeight, source);
  std::vector<float> w(static_cast<size_t>(40 * in));
  format::unpack(kWeight, shape, packed.bytes(), w);
  const auto x = test::random_floats(rng, in);
  const auto out =
      test::multiply(test::scalar_kernel(kWeight), {shape, 1, 0, 3}, packed.bytes(), x, {0}, fine);
  const auto used = rounded(x, test::fine_above(fine, 0));
  for (size_t i = 0; i < 40; ++i) {
    double sum = 0.0, size = 0.0;
    for (size_t k = 0; k < x.size(); ++k) {
      const double product = double{w[i * x.size() + k]} * used[k];
      sum += product;
      size += std::fabs(product);
    }
    CHECK(std::fabs(out[i] - sum) <= static_cast<double>(in / 128 + 4) * 0x1p-24 * size);
  }
}

void check_case(test::Rng& rng, const Case& c) {
  const auto source = test::random_weight(rng, kWeight, c.shape);
  const test::PackedMemory packed(kWeight, source);
  const auto x = test::random_floats(rng, (c.tokens + 2) * c.shape.in_features);
  std::vector<int32_t> index;
  for (int64_t t = 0; t < c.tokens; ++t)
    index.push_back(static_cast<int32_t>(test::pick(rng, 0, c.tokens + 1)));
  const test::Fine fine = test::random_fine(rng);
  for (bool indexed : {true, false}) {
    if (!indexed) index.clear();
    const auto expected = test::multiply(test::scalar_kernel(kWeight), c, packed.bytes(), x, index, fine);
    for (const gemm::Kernel* kernel : cells())
      if (!test::same_bits(test::multiply(*kernel, c, packed.bytes(), x, index, fine), expected))
        test::report(false, __FILE__, __LINE__, "differs from ref: " + test::describe(*kernel, c));
  }
}

Case random_case(test::Rng& rng) {
  Case c{};
  c.shape = {test::pick(rng, 1, 70), 32 * test::pick(rng, 1, 20)};
  c.tokens = test::pick(rng, 1, 40);
  c.panel_begin = test::pick(rng, 0, c.shape.panels() - 1);
  c.panel_end = test::pick(rng, c.panel_begin + 1, c.shape.panels());
  return c;
}

// The largest dot product of a group, of either sign, in every cell.
void extremes() {
  const format::Shape shape{16, 256};
  for (int8_t q : {int8_t{127}, int8_t{-127}, int8_t{-128}}) {
    test::CheckpointWeight source{shape, test::bytes_of(std::vector<int8_t>(16 * 256, q)), {}};
    source.scales = test::bytes_of(std::vector<uint16_t>(32, base::f32_to_bf16(1.0f)));
    const test::PackedMemory packed(kWeight, source);
    for (float sign : {1.0f, -1.0f})
      for (const gemm::Kernel* kernel : cells())
        for (int64_t tokens : {1, 20}) {
          const std::vector<float> x(static_cast<size_t>(256 * tokens), sign * 32512.0f);
          const auto out =
              test::multiply(*kernel, {shape, tokens, 0, 1}, packed.bytes(), x, {}, test::Fine::kAll);
          for (size_t r = 0; r < 16; ++r) CHECK_EQ(out[r], sign * static_cast<float>(q) * 256.0f * 32512.0f);
        }
  }
}

// Rows are equal in every cell, also when they are written group by group, with an end within a group.
void quantization(test::Rng& rng, int64_t in) {
  auto x = test::random_floats(rng, in);
  for (size_t i = 0; i < 128; ++i) x[i] = 0.0f;                                     // an empty group
  for (size_t i = 128; i < 256; ++i) x[i] = 0x1p-149f * static_cast<float>(i % 9);  // d underflows to 0
  for (size_t i = 256; i < 384; ++i) x[i] = 0x1p-149f * 40000.0f;                   // d is subnormal: clamped
  for (size_t i = 384; i < 512; ++i) x[i] = (static_cast<float>(i) - 383.5f) * (i % 2 == 0 ? 1.0f : -1.0f);
  x[384] = 32512.0f;  // d is 1, the others are halves
  const auto bytes = static_cast<size_t>(gemm::int16_row_bytes(in));
  std::vector<std::byte> expected(bytes), row(bytes);
  test::scalar_kernel(kWeight).quantize(x.data(), 0, in, in, gemm::kAllFine, expected.data());
  const gemm::Int16Row read(expected.data(), in);
  CHECK_EQ(read.planes[gemm::int16_position(384)], 127);
  CHECK_EQ(read.planes[gemm::int16_position(385)] * 256 +
               read.planes[gemm::int16_position(385) + gemm::kInt16Step],
           -2);  // -1.5 to even
  for (const gemm::Kernel* kernel : cells()) {
    kernel->quantize(x.data() + 128, 128, in - 128, in, gemm::kAllFine, row.data());
    kernel->quantize(x.data(), 0, 128, in, gemm::kAllFine, row.data());
    CHECK(row == expected);
  }
  x[600] = std::numeric_limits<float>::quiet_NaN();
  for (const gemm::Kernel* kernel : cells()) {
    kernel->quantize(x.data(), 0, in, in, gemm::kAllFine, row.data());
    CHECK(std::isnan(gemm::Int16Row(row.data(), in).scale[4]));
  }
}

}  // namespace

int main() {
  test::Rng rng(11);
  for (int64_t in : {32, 96, 160, 640})
    for (const test::Fine fine : {test::Fine::kNone, test::Fine::kSome, test::Fine::kAll})
      scalar_is_right(rng, in, fine);
  for (int i = 0; i < 60; ++i) check_case(rng, random_case(rng));
  check_case(rng, {{37, 256}, 150, 0, 3});  // more tokens than one pass takes
  check_case(rng, {{37, 1120}, 64, 0, 3});  // more columns than a chunk has
  check_case(rng, {{64, 1184}, 45, 1, 4});
  extremes();
  for (int64_t in : {640, 672, 704, 736}) quantization(rng, in);
  return test::result();
}
