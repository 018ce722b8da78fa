// Every cell this CPU can run gives the bits of the scalar cell; activations, silu and selection.
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "format/int4.h"
#include "gemm/act_format.h"
#include "gemm/kernel.h"
#include "gemm/quantized_act.h"
#include "tests/check.h"
#include "tests/kernel_case.h"
#include "tests/random_weight.h"

namespace {

using namespace proa;
using format::WeightFormat;
using test::Case;
using test::multiply;
using test::runnable;
using test::same_bits;
using test::scalar_kernel;

// Those with a scalar cell.
std::vector<WeightFormat> formats_with_cells() {
  std::vector<WeightFormat> formats;
  for (const WeightFormat weight : test::packable_formats())
    if (gemm::select_kernel(weight, {32, 256}, 0) != nullptr) formats.push_back(weight);
  return formats;
}

void check_case(test::Rng& rng, WeightFormat weight, const Case& c) {
  const auto source = test::random_weight(rng, weight, c.shape);
  const test::PackedMemory packed(weight, source);
  const int64_t num_rows = c.tokens + 2;
  const auto x = test::random_floats(rng, num_rows * c.shape.in_features);
  std::vector<int32_t> index;
  for (int64_t t = 0; t < c.tokens; ++t)
    index.push_back(static_cast<int32_t>(test::pick(rng, 0, num_rows - 1)));
  if (test::pick(rng, 0, 1) == 0) index.clear();
  const test::Fine fine = test::random_fine(rng);
  std::map<gemm::ActFormat, std::vector<float>> expected;
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (kernel->weight != weight || !runnable(*kernel)) continue;
    if (gemm::is_bf16_tiles(kernel->act)) continue;  // other bits: split_act_test.cc
    std::vector<float>& scalar = expected[kernel->act];
    if (scalar.empty())
      scalar = multiply(*scalar_kernel(weight, kernel->act), c, packed.bytes(), x, index, fine);
    const auto out = multiply(*kernel, c, packed.bytes(), x, index, fine);
    if (!same_bits(out, scalar))
      test::report(false, __FILE__, __LINE__, "differs from ref: " + test::describe(*kernel, c));
  }
}

// The scalar cells against float64: the tolerance is (K + 3) eps sum |w x|, for int4 on the quantized
// activations.
void scalar_is_right(test::Rng& rng, WeightFormat weight, test::Fine fine) {
  constexpr int64_t kIn = 256;
  const auto& kernel = scalar_kernel(weight);
  if (kernel.act == gemm::ActFormat::kInt16G128) return;  // int8_g128_test.cc
  if (format::format_info(weight).has_minimum) return;    // grouped_test.cc
  const format::Shape shape{40, kIn};
  const auto source = test::random_weight(rng, weight, shape);
  const test::PackedMemory packed(weight, source);
  std::vector<float> w(40 * kIn);
  format::unpack(weight, shape, packed.bytes(), w);
  auto x = test::random_floats(rng, kIn);
  const auto out = multiply(kernel, {shape, 1, 0, 3}, packed.bytes(), x, {0}, fine);
  if (kernel.quantize != nullptr) {
    for (size_t g = 0; g < kIn / 32; ++g) {
      float largest = 0.0f;
      for (size_t c = 0; c < 32; ++c) largest = std::max(largest, std::fabs(x[32 * g + c]));
      const float d = largest / (largest > test::fine_above(fine, 0) ? 8.0f * 127.0f : 127.0f);
      for (size_t c = 0; c < 32; ++c) x[32 * g + c] = std::nearbyint(x[32 * g + c] / d) * d;
    }
  }
  for (size_t i = 0; i < 40; ++i) {
    double sum = 0.0, size = 0.0;
    for (size_t k = 0; k < kIn; ++k) {
      sum += double{w[i * kIn + k]} * x[k];
      size += std::fabs(double{w[i * kIn + k]} * x[k]);
    }
    CHECK(std::fabs(out[i] - sum) <= (kIn + 3) * 0x1p-24 * size);
  }
}

// The cells with f32 activations give the bits of an f32 weight that holds the dequantized values. A factor
// of the whole row comes last, so it must be 1 here.
void float_cells_are_dequantized(test::Rng& rng, WeightFormat weight) {
  if (scalar_kernel(weight, gemm::ActFormat::kF32) == nullptr || weight == WeightFormat::kFp8Block128 ||
      weight == WeightFormat::kFp8Channel)
    return;
  Case c = test::random_case(rng, weight);
  auto source = test::random_weight(rng, weight, c.shape);
  source.global_scale = 1.0f;
  const test::PackedMemory packed(weight, source);
  std::vector<float> values(static_cast<size_t>(c.shape.out_features * c.shape.in_features));
  format::unpack(weight, c.shape, packed.bytes(), values);
  const test::PackedMemory plain(WeightFormat::kF32, {c.shape, test::bytes_of(values), {}});
  const auto x = test::random_floats(rng, c.tokens * c.shape.in_features);
  CHECK(same_bits(multiply(*scalar_kernel(weight, gemm::ActFormat::kF32), c, packed.bytes(), x, {}),
                  multiply(scalar_kernel(WeightFormat::kF32), c, plain.bytes(), x, {})));
}

// u = 15 in every weight and |q| = 127 in every activation: the largest sums an int16 path meets.
void extremes() {
  const format::Shape shape{16, 64};
  test::CheckpointWeight source{shape, std::vector<std::byte>(16 * 32, std::byte{0xff}), {}};
  source.scales = test::bytes_of(std::vector<uint16_t>(32, base::f32_to_bf16(1.0f)));
  const test::PackedMemory packed(WeightFormat::kInt4G32, source);
  for (float sign : {1.0f, -1.0f})
    for (const gemm::Kernel* kernel : gemm::all_kernels()) {
      if (kernel->weight != WeightFormat::kInt4G32 || !runnable(*kernel)) continue;
      const auto out =
          multiply(*kernel, {shape, 1, 0, 1}, packed.bytes(), std::vector<float>(64, sign * 127.0f), {0});
      for (size_t r = 0; r < 16; ++r) CHECK_EQ(out[r], sign * 7.0f * 127.0f * 64.0f);
    }
}

// Row i of a weight [256, 32] in an fp8 format: codes[i] at column i % 32, zeros elsewhere.
test::CheckpointWeight one_code_per_row(WeightFormat weight, const std::vector<uint8_t>& codes,
                                        const std::vector<std::byte>& scales) {
  std::vector<uint8_t> data(256 * 32);
  for (size_t i = 0; i < 256; ++i) data[32 * i + i % 32] = codes[i];
  test::CheckpointWeight source{{256, 32}, test::bytes_of(data), scales, 1.0f};
  CHECK(format::format_info(weight).reject(source.shape) == nullptr);
  return source;
}

// The outputs of every cell for activations of 1 are `expected`; NaN for NaN.
void check_rows(WeightFormat weight, const test::CheckpointWeight& source,
                const std::vector<float>& expected) {
  const test::PackedMemory packed(weight, source);
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (kernel->weight != weight || !runnable(*kernel)) continue;
    if (gemm::is_bf16_tiles(kernel->act) && weight == WeightFormat::kMxFp8) continue;
    for (int64_t tokens : {1, 3}) {
      const std::vector<float> ones(static_cast<size_t>(3 * source.shape.in_features), 1.0f);
      const auto out = multiply(*kernel, {source.shape, tokens, 0, 16}, packed.bytes(), ones, {0, 1, 2});
      for (size_t i = 0; i < expected.size(); ++i)
        CHECK(std::isnan(expected[i]) ? std::isnan(out[i]) : out[i] == expected[i]);
    }
  }
}

void fp8_codes() {
  std::vector<uint8_t> codes;
  std::vector<float> expected;
  for (int i = 0; i < 256; ++i) {
    codes.push_back(static_cast<uint8_t>(i));
    expected.push_back(base::fp8_e4m3_to_f32(codes.back()));
  }
  const auto ones = [](size_t n) { return test::bytes_of(std::vector<float>(n, 1.0f)); };
  const auto check = [&](WeightFormat weight, const std::vector<std::byte>& scales) {
    check_rows(weight, one_code_per_row(weight, codes, scales), expected);
  };
  check(WeightFormat::kFp8Block128, ones(2));
  check(WeightFormat::kFp8Channel, ones(256));
  check(WeightFormat::kMxFp8, std::vector<std::byte>(256, std::byte{127}));
}

// All 256 scales, times the least, a normal and the largest element: subnormal, infinite and NaN products
// included.
void e8m0_scales() {
  for (uint8_t code : {0x01, 0x38, 0xfe}) {
    std::vector<std::byte> scales;
    std::vector<float> expected;
    for (int i = 0; i < 256; ++i) {
      scales.push_back(static_cast<std::byte>(i));
      const double scale = i == 255 ? std::nan("") : std::ldexp(1.0, i - 127);
      expected.push_back(static_cast<float>(scale * base::fp8_e4m3_to_f32(code)));
    }
    check_rows(WeightFormat::kMxFp8,
               one_code_per_row(WeightFormat::kMxFp8, std::vector<uint8_t>(256, code), scales), expected);
  }
}

// Rows of int8 activations: every cell writes what the scalar one does, in one piece or several.
void quantization(test::Rng& rng, const gemm::Kernel& scalar, float fine_above) {
  auto x = test::random_floats(rng, 320);
  for (size_t i = 0; i < 32; ++i) x[i] = 0.0f;                                    // an empty group
  for (size_t i = 32; i < 64; ++i) x[i] = 0x1p-149f * static_cast<float>(i % 9);  // d underflows to 0
  for (size_t i = 64; i < 96; ++i) x[i] = 0x1p-149f * 190.0f;                     // d is subnormal: clamped
  for (size_t i = 96; i < 128; ++i)
    x[i] = (static_cast<float>(i) - 96.5f) * (i % 2 == 0 ? 1.0f : -1.0f);  // halves
  const auto bytes = static_cast<size_t>(gemm::act_row_bytes(scalar.act, 320));
  std::vector<std::byte> expected(bytes), row(bytes);
  scalar.quantize(x.data(), 0, 320, 320, fine_above, expected.data());
  auto with_nan = x;
  with_nan[200] = std::numeric_limits<float>::quiet_NaN();
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (kernel->weight != scalar.weight || kernel->act != scalar.act || !runnable(*kernel)) continue;
    kernel->quantize(x.data() + 64, 64, 256, 320, fine_above, row.data());  // in two parts
    kernel->quantize(x.data(), 0, 64, 320, fine_above, row.data());
    CHECK(row == expected);
    kernel->quantize(with_nan.data(), 0, 320, 320, fine_above, row.data());
    CHECK(std::isnan(gemm::quantized_row<format::Int4G32>(row.data(), 320).scale[6]));
  }
}

void selection() {
  const format::Shape odd{16, 48};
  CHECK(gemm::select_kernel(WeightFormat::kInt4G32, odd, cpu::isa_choice().in_use) == nullptr);
  for (const auto& candidate : gemm::explain_selection(WeightFormat::kInt4G32, odd, ~cpu::IsaMask{0})) {
    CHECK(!candidate.chosen);
    CHECK(candidate.reason.find("32") != std::string::npos);
  }
  for (WeightFormat weight : formats_with_cells()) {
    int chosen = 0;
    for (const auto& candidate : gemm::explain_selection(weight, {16, 256}, cpu::kAvx2Tier)) {
      CHECK(!candidate.reason.empty());
      if (candidate.chosen) CHECK_EQ(std::string(candidate.kernel->name).substr(0, 5), std::string("avx2."));
      chosen += candidate.chosen;
    }
    CHECK_EQ(chosen, 1);
    const auto act = [&](gemm::Activations activations) {
      return gemm::select_kernel(weight, {16, 256}, ~cpu::IsaMask{0}, activations)->act;
    };
    CHECK(act(gemm::Activations::kTrunk) != gemm::ActFormat::kBf16);
    CHECK(!gemm::is_int8(act(gemm::Activations::kBf16)));
    CHECK_EQ(std::string(scalar_kernel(weight).name).substr(0, 4), std::string("ref."));
  }
}

}  // namespace

int main() {
  test::Rng rng(2);
  for (WeightFormat weight : formats_with_cells()) {
    for (const test::Fine fine : {test::Fine::kNone, test::Fine::kSome, test::Fine::kAll})
      scalar_is_right(rng, weight, fine);
    const gemm::ActFormat act = scalar_kernel(weight).act;
    if (act == gemm::ActFormat::kInt8G32 || act == gemm::ActFormat::kInt8G32Halves)
      for (const test::Fine fine : {test::Fine::kNone, test::Fine::kSome, test::Fine::kAll})
        quantization(rng, scalar_kernel(weight), test::fine_above(fine, 0));
    for (int i = 0; i < 60; ++i) check_case(rng, weight, test::random_case(rng, weight));
    for (int i = 0; i < 10; ++i) float_cells_are_dequantized(rng, weight);
    const auto columns = [&](int64_t n) {
      const int64_t step = test::column_step(weight);
      return (n + step - 1) / step * step;
    };
    check_case(rng, weight, {{37, 256}, 150, 0, 3});           // more tokens than one pass takes
    check_case(rng, weight, {{37, columns(1120)}, 64, 0, 3});  // more columns than a chunk has
    check_case(rng, weight, {{37, columns(1184)}, 45, 0, 3});  // more columns than a chunk has
  }
  extremes();
  fp8_codes();
  e8m0_scales();
  selection();
  return test::result();
}
