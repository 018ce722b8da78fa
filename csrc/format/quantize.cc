#include "format/quantize.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "base/scalar.h"

namespace proa::format {
namespace {

constexpr float kE4m3Max = 448.0f;

constexpr int64_t blocks(int64_t n, int64_t size) noexcept { return (n + size - 1) / size; }

namespace baseline {
#include "format/quantize-inl.h"
}

#pragma GCC push_options
#pragma GCC target("avx2")
namespace with_avx2 {
#include "format/quantize-inl.h"
}
#pragma GCC pop_options

}  // namespace

QuantizeError quantize(const QuantizeJob& job, bool avx2) {
  const auto in = static_cast<size_t>(job.values.shape.in_features);
  std::vector<float> values(in), restored(in);
  return avx2 ? with_avx2::quantize_all(job, values.data(), restored.data())
              : baseline::quantize_all(job, values.data(), restored.data());
}

}  // namespace proa::format
