// Activations as bf16 terms: a scalar model of the cells that read them stays within its error bound, and
// every such cell this CPU can run has the bits of the model, whatever the batch.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "format/bf16.h"
#include "format/fp8_block128.h"
#include "format/fp8_channel.h"
#include "format/mxfp8.h"
#include "tests/check.h"
#include "tests/kernel_case.h"

namespace {

using namespace proa;
using format::WeightFormat;
using test::Case;

constexpr WeightFormat kFormats[] = {WeightFormat::kBf16, WeightFormat::kFp8Block128,
                                     WeightFormat::kFp8Channel, WeightFormat::kMxFp8};

int64_t terms_of(gemm::ActFormat act) { return act == gemm::ActFormat::kBf16 ? 1 : 2; }

// The terms of x, by the definition of gemm/split_act.h.
std::vector<float> split(float x, int64_t count) {
  std::vector<float> terms;
  for (int64_t i = 0; i < count; ++i) {
    terms.push_back(base::bf16_to_f32(base::f32_to_bf16(x)));
    x = std::isfinite(terms.back()) ? x - terms.back() : 0.0f;
  }
  return terms;
}

// The tile product of 32 columns added to `sum`: even and odd columns apart, as the instruction does.
float add_columns(const float* w, const float* x, int64_t columns, float sum) {
  float half[2] = {0.0f, 0.0f};
  for (int64_t k = 0; k < columns; ++k) half[k % 2] = std::fma(x[k], w[k], half[k % 2]);
  return sum + (half[0] + half[1]);
}

// Element k of a row of a panel as tiles multiply it: scales of sums are left out.
float tile_weight(WeightFormat weight, const std::byte* panel, int64_t row, int64_t k) {
  switch (weight) {
    case WeightFormat::kBf16:
      return format::bf16::decode(panel, row, k);
    case WeightFormat::kFp8Channel:
      return format::fp8_channel::decode(panel, row, k);
    case WeightFormat::kMxFp8:
      return format::mxfp8::decode(panel, row, k);
    default:
      return format::fp8_block128::decode(panel, row, k);
  }
}

std::vector<float> weight_row(WeightFormat weight, const Case& c, std::span<const std::byte> packed,
                              int64_t row) {
  const std::byte* panel =
      packed.data() + row / format::kPanelRows * format::panel_bytes(weight, c.shape.in_features);
  std::vector<float> values;
  for (int64_t k = 0; k < c.shape.in_features; ++k)
    values.push_back(tile_weight(weight, panel, row % format::kPanelRows, k));
  return values;
}

// The scale of the block of 128 columns from k on; nullptr: sums of 128 columns have none.
const float* scale_of(WeightFormat weight, const Case& c, std::span<const std::byte> packed, int64_t row,
                      int64_t k) {
  if (weight != WeightFormat::kFp8Block128) return nullptr;
  const int64_t in = c.shape.in_features;
  const std::byte* panel = packed.data() + row / format::kPanelRows * format::panel_bytes(weight, in);
  return format::fp8_block128::block_scales(panel, in) + k / format::kFp8Block;
}

// What the total of a row is multiplied by.
float row_scale_of(WeightFormat weight, const Case& c, std::span<const std::byte> packed, int64_t row) {
  if (weight != WeightFormat::kFp8Channel) return 1.0f;
  const int64_t in = c.shape.in_features;
  const std::byte* panel = packed.data() + row / format::kPanelRows * format::panel_bytes(weight, in);
  return format::fp8_channel::row_scales(panel, in)[row % format::kPanelRows];
}

struct Output {
  float model;
  double exact;
  double bound;  // of |model - exact|
};

Output one_output(WeightFormat weight, const Case& c, std::span<const std::byte> packed, int64_t row,
                  const float* x, int64_t num_terms) {
  const int64_t in = c.shape.in_features;
  const auto w = weight_row(weight, c, packed, row);
  std::vector<std::vector<float>> terms(static_cast<size_t>(num_terms));
  for (int64_t k = 0; k < in; ++k) {
    const auto parts = split(x[k], num_terms);
    for (size_t i = 0; i < parts.size(); ++i) terms[i].push_back(parts[i]);
  }
  const float row_scale = row_scale_of(weight, c, packed, row);
  float total = 0.0f, sum = 0.0f;
  double exact = 0.0, size = 0.0;
  for (int64_t k = 0; k < in; k += gemm::kSplitColumns) {
    const float* scale = scale_of(weight, c, packed, row, k);
    const int64_t columns = std::min(gemm::kSplitColumns, in - k);
    for (const auto& term : terms) sum = add_columns(w.data() + k, term.data() + k, columns, sum);
    for (int64_t i = k; i < k + columns; ++i) {
      const double product =
          double{w[static_cast<size_t>(i)]} * x[i] * (scale == nullptr ? row_scale : *scale);
      exact += product;
      size += std::fabs(product);
    }
    if (scale == nullptr || ((k + columns) % format::kFp8Block != 0 && k + columns != in)) continue;
    total = std::fma(sum, *scale, total);
    sum = 0.0f;
  }
  // Splitting, then the roundings a product can meet: 16 steps of its half, the sum of the halves, one sum
  // per term and 32 columns, one per 128 columns, the scale of the row.
  const double roundings = 18.0 + 2.0 * static_cast<double>(in / gemm::kSplitColumns + 1) +
                           static_cast<double>(in / format::kFp8Block + 1);
  return {weight == WeightFormat::kFp8Block128 ? total : sum * row_scale, exact,
          ((num_terms == 1 ? 0x1p-8 : 0x1p-16) + roundings * 0x1p-24) * 1.01 * size};
}

void check_case(test::Rng& rng, WeightFormat weight, gemm::ActFormat act, const Case& c, bool indexed) {
  const auto source = test::random_weight(rng, weight, c.shape);
  const test::PackedMemory packed(weight, source);
  const int64_t in = c.shape.in_features;
  const auto x = test::random_floats(rng, (c.tokens + 2) * in);
  std::vector<int32_t> index;
  for (int64_t t = 0; t < c.tokens; ++t)
    index.push_back(static_cast<int32_t>(indexed ? test::pick(rng, 0, c.tokens + 1) : t));
  const int64_t stride = (c.panel_end - c.panel_begin) * format::kPanelRows + 3;
  std::vector<float> expected(static_cast<size_t>(c.tokens * stride), test::kUntouched);
  const int64_t first_row = c.panel_begin * format::kPanelRows;
  const int64_t end_row = std::min(c.panel_end * format::kPanelRows, c.shape.out_features);
  bool within = true;
  for (int64_t t = 0; t < c.tokens; ++t)
    for (int64_t row = first_row; row < end_row; ++row) {
      const float* token = x.data() + index[static_cast<size_t>(t)] * in;
      const Output o = one_output(weight, c, packed.bytes(), row, token, terms_of(act));
      within = within && std::fabs(o.model - o.exact) <= o.bound;
      expected[static_cast<size_t>(t * stride + row - first_row)] = o.model;
    }
  CHECK(within);
  if (!indexed) index.clear();
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (kernel->weight != weight || kernel->act != act || !test::runnable(*kernel)) continue;
    if (!test::same_bits(test::multiply(*kernel, c, packed.bytes(), x, index), expected))
      test::report(false, __FILE__, __LINE__, "differs from the model: " + test::describe(*kernel, c));
  }
}

// Terms of every kind of number, and that a row may be written in parts.
void terms() {
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (!gemm::is_bf16_tiles(kernel->act) || !test::runnable(*kernel)) continue;
    const auto num_terms = static_cast<size_t>(terms_of(kernel->act));
    const float inf = std::numeric_limits<float>::infinity();
    std::vector<float> x = {0.0f, -0.0f, 1.0f, 1.0039063f, -3.1415927f, 1e-30f, 1e30f, inf, -inf, 3.4e38f};
    for (int i = 0; x.size() < 75; ++i)
      x.push_back(std::ldexp(1.0f + 0.0137f * static_cast<float>(i), i - 40));
    std::vector<std::byte> row(static_cast<size_t>(gemm::act_row_bytes(kernel->act, 75)));
    kernel->quantize(x.data() + 32, 32, 43, 75, 0.0f, row.data());
    kernel->quantize(x.data(), 0, 32, 75, 0.0f, row.data());
    const auto* bits = reinterpret_cast<const uint16_t*>(row.data());
    for (size_t k = 0; k < 96; ++k) {
      const auto expected =
          k < x.size() ? split(x[k], terms_of(kernel->act)) : std::vector<float>(num_terms, 0.0f);
      for (size_t i = 0; i < expected.size(); ++i)
        CHECK_EQ(base::bf16_to_f32(bits[k / 32 * 32 * num_terms + 32 * i + k % 32]), expected[i]);
    }
    x[0] = std::numeric_limits<float>::quiet_NaN();
    kernel->quantize(x.data(), 0, 32, 75, 0.0f, row.data());
    CHECK(std::isnan(base::bf16_to_f32(bits[0])));
    if (num_terms == 2) CHECK_EQ(bits[32], 0);
  }
}

// Products around the smallest normal float, half of which count as 0: one token as in a batch.
void tiny_products(test::Rng& rng) {
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (!gemm::is_bf16_tiles(kernel->act) || !test::runnable(*kernel)) continue;
    const Case batch{{48, 320}, 5, 0, 3}, one{{48, 320}, 1, 0, 3};
    const auto source = test::random_weight(rng, kernel->weight, batch.shape);
    const test::PackedMemory packed(kernel->weight, source);
    std::vector<float> x = test::random_floats(rng, 7 * 320);
    for (float& value : x) value *= 0x1p-122f;
    const auto all = test::multiply(*kernel, batch, packed.bytes(), x, {0, 1, 2, 3, 4});
    for (int32_t t = 0; t < 5; ++t) {
      const auto row = test::multiply(*kernel, one, packed.bytes(), x, {t});
      CHECK(std::memcmp(row.data(), all.data() + t * 51, 48 * sizeof(float)) == 0);
    }
  }
}

}  // namespace

int main() {
  test::Rng rng(8);
  for (WeightFormat weight : kFormats)
    for (gemm::ActFormat act : {gemm::ActFormat::kBf16, gemm::ActFormat::kBf16x2}) {
      const auto check = [&](const Case& c, bool indexed) { check_case(rng, weight, act, c, indexed); };
      for (int i = 0; i < 20; ++i) check(test::random_case(rng, weight), i % 2 == 0);
      for (bool indexed : {false, true}) {
        check({{37, 256}, 150, 0, 3}, indexed);  // more tokens than one pass takes
        check({{150, 700}, 33, 1, 9}, indexed);  // more columns than a chunk has
        check({{40, 2500}, 5, 0, 3}, indexed);   // the same for few tokens
        check({{33, 2500}, 1, 0, 3}, indexed);
        check({{64, 512}, 64, 0, 4}, indexed);  // nothing ragged
      }
    }
  terms();
  tiny_products(rng);
  return test::result();
}
