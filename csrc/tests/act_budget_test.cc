// Which groups of int8 activations get two planes: tokens of any distribution keep to the budget, and only
// those that need it pay.
#include "gemm/act_budget.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "format/int4.h"
#include "gemm/act_format.h"
#include "gemm/int16_act.h"
#include "gemm/quantized_act.h"
#include "tests/check.h"
#include "tests/kernel_case.h"

namespace {

using namespace proa;
using gemm::ActFormat;

constexpr int64_t kIn = 2048, kTokens = 64;
constexpr ActFormat kActs[] = {ActFormat::kInt8G32, ActFormat::kInt16G128};

std::vector<float> restored(const gemm::Kernel& kernel, const std::vector<float>& x, float fine_above) {
  std::vector<std::byte> bytes(static_cast<size_t>(gemm::act_row_bytes(kernel.act, kIn)));
  kernel.quantize(x.data(), 0, kIn, kIn, fine_above, bytes.data());
  std::vector<float> result(x.size());
  if (kernel.act == ActFormat::kInt8G32) {
    const auto row = gemm::quantized_row<format::Int4G32>(bytes.data(), kIn);
    for (int64_t k = 0; k < kIn; ++k) {
      const int64_t g = k / 32, at = 32 * g + format::quad_position(k % 32);
      const int v = row.q[at] + (row.fine[g] ? 8 * row.high[at] : 0);
      result[static_cast<size_t>(k)] = row.scale[g] * static_cast<float>(v);
    }
  } else {
    const gemm::Int16Row row(bytes.data(), kIn);
    for (int64_t k = 0; k < kIn; ++k) {
      const int8_t* plane = row.planes + gemm::int16_position(k);
      result[static_cast<size_t>(k)] = row.scale[k / 128] * static_cast<float>(256 * plane[0] + plane[64]);
    }
  }
  return result;
}

using Distribution = std::function<float(test::Rng&, int64_t k)>;

// Squared error over squared norm, the mean over tokens; `fine_groups` the part of groups with two planes.
double squared_error(const gemm::Kernel& kernel, const Distribution& draw, float budget,
                     double& fine_groups) {
  test::Rng rng(5);
  const int64_t group = gemm::act_group(kernel.act);
  double total = 0.0, fine = 0.0;
  for (int64_t t = 0; t < kTokens; ++t) {
    std::vector<float> x(kIn);
    for (int64_t k = 0; k < kIn; ++k) x[static_cast<size_t>(k)] = draw(rng, k);
    const float above = gemm::fine_above(kernel, x.data(), kIn, budget);
    const auto y = restored(kernel, x, above);
    double error = 0.0, norm = 0.0;
    for (size_t first = 0; first < x.size(); first += static_cast<size_t>(group)) {
      float absmax = 0.0f;
      for (size_t k = first; k < first + static_cast<size_t>(group); ++k) {
        error += (double{x[k]} - y[k]) * (double{x[k]} - y[k]);
        norm += double{x[k]} * x[k];
        absmax = std::max(absmax, std::fabs(x[k]));
      }
      fine += absmax > above;
    }
    total += error / norm;
  }
  fine_groups = fine / static_cast<double>(kTokens * kIn / group);
  return total / kTokens;
}

// What the groups with two planes add: act_budget.h. The mean of 64 tokens of at least 1000 roundings each is
// within 2 % of the expected square. Where a budget is exceeded with one plane, little of it stays unused.
void every_distribution_keeps_the_budget(const gemm::Kernel& kernel, float budget) {
  std::normal_distribution<float> normal;
  std::cauchy_distribution<float> cauchy;
  std::student_t_distribution<float> t3(3.0f);
  const Distribution draws[] = {
      [&](test::Rng& rng, int64_t) { return normal(rng); },
      [&](test::Rng& rng, int64_t k) { return normal(rng) * (k % 341 == 7 ? 80.0f : 1.0f); },
      [&](test::Rng& rng, int64_t k) { return normal(rng) * (k % 32 == 5 ? 20.0f : 1.0f); },
      [&](test::Rng& rng, int64_t k) { return normal(rng) * (k / 256 == 3 ? 50.0f : 1.0f); },
      [&](test::Rng& rng, int64_t) { return normal(rng) * normal(rng) * normal(rng); },
      [&](test::Rng& rng, int64_t) { return t3(rng); },
      [&](test::Rng& rng, int64_t) { return cauchy(rng); },
      [&](test::Rng& rng, int64_t k) { return k == 100 ? 1e9f : normal(rng); },
  };
  const double fine_error =
      kernel.act == ActFormat::kInt8G32 ? 32.0 / 12 / 1016 / 1016 : 128.0 / 12 / 32512 / 32512;
  for (const Distribution& draw : draws) {
    double fine_groups;
    const double error = squared_error(kernel, draw, budget, fine_groups);
    CHECK(error <= 1.02 * (double{budget} * budget + fine_error));
    CHECK(fine_groups < 0.6 || &draw == draws + 2);
    if (&draw == draws && budget == gemm::act_budget(kernel).input) CHECK(fine_groups < 0.02);
    if (&draw == draws + 1) CHECK(fine_groups > 0.0);
    if (&draw == draws + 4) CHECK(fine_groups > 0.0 && error > 0.7 * double{budget} * budget);
  }
}

// The inputs of down are products of two nearly normal numbers, one of them through silu: in groups of 32 few
// get two planes.
void products_get_few_second_planes(const gemm::Kernel& kernel) {
  std::normal_distribution<float> normal;
  const Distribution draw = [&](test::Rng& rng, int64_t) {
    const float gate = normal(rng), up = normal(rng);
    return gate / (1.0f + std::exp(-gate)) * up;
  };
  double fine_groups;
  squared_error(kernel, draw, gemm::act_budget(kernel).product, fine_groups);
  CHECK(fine_groups < 0.08);
}

void limits(const gemm::Kernel& kernel) {
  const ActFormat act = kernel.act;
  constexpr float kNone = std::numeric_limits<float>::infinity();
  const float budget = gemm::act_budget(kernel).input;
  const auto above = [&](const std::vector<float>& x) {
    return gemm::fine_above(kernel, x.data(), static_cast<int64_t>(x.size()), budget);
  };
  test::Rng rng(6);
  std::vector<float> x(kIn, 1.0f);
  for (size_t k = 1; k < kIn; k += 2) x[k] = -0.5f;
  CHECK_EQ(above(x), kNone);
  x[70] = 100.0f;
  x[700] = -100.0f;
  CHECK_EQ(above(x), std::nextafter(100.0f, 0.0f));
  for (float& value : x) value *= 0x1p20f;
  CHECK_EQ(above(x), 0x1p20f * std::nextafter(100.0f, 0.0f));
  CHECK_EQ(gemm::fine_above(test::scalar_kernel(format::WeightFormat::kF32), x.data(), kIn, budget), kNone);
  for (const float odd : {kNone, -kNone, std::numeric_limits<float>::quiet_NaN()}) {
    x[3] = odd;
    CHECK_EQ(above(x), kNone);
  }
  CHECK_EQ(above(std::vector<float>(kIn)), kNone);
  CHECK_EQ(gemm::fine_above(kernel, x.data(), kIn, 0.0f), 0.0f);
  // A last group of fewer columns than the others, and more groups than are looked at one by one.
  std::vector<float> ragged(128 + 32, 1.0f);
  ragged.back() = 50.0f;
  CHECK_EQ(above(ragged), std::nextafter(50.0f, 0.0f));
  if (gemm::act_group(act) == 128) {
    // Rounding 1^2 * 128 + 2^2 * 32, of which 100 is allowed: without the last group's 128, too much is left.
    ragged.assign(128 + 32, 0.0f);
    ragged[0] = 1.0f;
    ragged[128] = 2.0f;
    const auto some = static_cast<float>(std::sqrt(100.0 / (12 * 127 * 127 * 5)));
    CHECK_EQ(gemm::fine_above(kernel, ragged.data(), 128 + 32, some), std::nextafter(1.0f, 0.0f));
  }
  std::vector<float> wide(int64_t{4097} * gemm::act_group(act), 1.0f);
  wide[5] = 1e4f;
  CHECK(above(wide) > 1.0f && above(wide) < 1e4f);
}

// Groups that stand out have two planes, however few would do.
void minimums() {
  const gemm::Kernel& kernel = test::scalar_kernel(format::WeightFormat::kQ4_1);
  CHECK_EQ(gemm::act_budget(kernel).product, 0.0f);
  std::vector<float> x(kIn, 1.0f);
  for (size_t k = 0; k < 32; ++k) x[64 * k] = 20.0f;
  const float above = gemm::fine_above(kernel, x.data(), kIn, gemm::act_budget(kernel).input);
  CHECK(above > 1.0f && above < 20.0f);
}

}  // namespace

int main() {
  minimums();
  for (const ActFormat act : kActs) {
    const auto weight =
        act == ActFormat::kInt8G32 ? format::WeightFormat::kInt4G32 : format::WeightFormat::kInt8G128;
    const gemm::Kernel& kernel = test::scalar_kernel(weight);
    for (const float budget : {gemm::act_budget(kernel).input, gemm::act_budget(kernel).product})
      every_distribution_keeps_the_budget(kernel, budget);
    if (act == ActFormat::kInt8G32) products_get_few_second_planes(kernel);
    limits(kernel);
  }
  return test::result();
}
