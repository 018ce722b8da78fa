// The quantizers on ragged shapes, the same with and without AVX2; under sanitizers, every access is checked.
// Their rules are compared with numpy's in tests/unit/test_convert_quantizer.py.
#include "format/quantize.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/xxh64.h"
#include "tests/check.h"
#include "tests/random_weight.h"

namespace {

using namespace proa;
using format::QuantizeTarget;
using format::ValueSource;

// Exactly as large as the target's arrays: an overrun is a sanitizer's report.
struct Result {
  std::vector<std::byte> data, scales;
  format::QuantizeError error;
};

int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

Result convert(ValueSource source, QuantizeTarget target, const format::RawWeight& raw, bool avx2) {
  const auto [out, in] = raw.shape;
  int64_t data_bytes = out * in, scale_bytes = 0;
  if (target == QuantizeTarget::kBf16) data_bytes = 2 * out * in;
  if (target == QuantizeTarget::kInt4G32) data_bytes = out * in / 2, scale_bytes = 2 * out * (in / 32);
  if (target == QuantizeTarget::kInt8G128) scale_bytes = 2 * out * blocks(in, 128);
  if (target == QuantizeTarget::kFp8Block128) scale_bytes = 4 * blocks(out, 128) * blocks(in, 128);
  Result result{std::vector<std::byte>(static_cast<size_t>(data_bytes)),
                std::vector<std::byte>(static_cast<size_t>(scale_bytes)),
                {}};
  result.error = format::quantize({source, target, raw, result.data.data(), result.scales.data()}, avx2);
  return result;
}

void both_loops_agree(format::Shape shape, test::Rng& rng) {
  const struct {
    ValueSource source;
    format::WeightFormat weight;
  } sources[] = {{ValueSource::kF32, format::WeightFormat::kF32},
                 {ValueSource::kBf16, format::WeightFormat::kBf16},
                 {ValueSource::kInt4G32, format::WeightFormat::kInt4G32},
                 {ValueSource::kFp8Block128, format::WeightFormat::kFp8Block128}};
  for (const auto& [source, weight] : sources)
    for (const auto target : {QuantizeTarget::kBf16, QuantizeTarget::kInt4G32, QuantizeTarget::kInt8G128,
                              QuantizeTarget::kFp8Block128}) {
      const bool groups = target == QuantizeTarget::kInt4G32 || weight == format::WeightFormat::kInt4G32;
      if (groups && shape.in_features % 32 != 0) continue;
      const auto stored = test::random_weight(rng, weight, shape);
      const Result plain = convert(source, target, stored.raw(), false);
      const Result vector = convert(source, target, stored.raw(), __builtin_cpu_supports("avx2"));
      CHECK(plain.data == vector.data);
      CHECK(plain.scales == vector.scales);
      CHECK_EQ(plain.error.squared_error, vector.error.squared_error);
      CHECK_EQ(plain.error.squared_norm, vector.error.squared_norm);
      CHECK_EQ(plain.error.max_abs, vector.error.max_abs);
      CHECK(plain.error.finite && vector.error.finite);
    }
}

void infinity_is_reported() {
  std::vector<float> values(3 * 160, 1.0f);
  values.back() = INFINITY;
  const format::RawWeight raw{{3, 160}, values.data(), nullptr};
  for (const auto target : {QuantizeTarget::kBf16, QuantizeTarget::kInt4G32, QuantizeTarget::kInt8G128,
                            QuantizeTarget::kFp8Block128})
    CHECK(!convert(ValueSource::kF32, target, raw, false).error.finite);
}

}  // namespace

int main() {
  test::Rng rng(7);
  for (const format::Shape shape : {format::Shape{1, 32}, {3, 160}, {130, 288}, {129, 131}, {5, 1}})
    both_loops_agree(shape, rng);
  infinity_is_reported();
  CHECK_EQ(base::xxh64({}), 0xef46db3751d8e999u);
  return test::result();
}
