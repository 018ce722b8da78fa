#include "format/int8_g128.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "gemm/int16_act.h"
#include "gemm/ref/each_output.h"
#include "gemm/registry.h"

namespace proa::gemm {
namespace {

// As an integer maximum, so that a NaN wins over every number.
float abs_max(const float* x, int64_t n) noexcept {
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits = std::max(bits, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return std::bit_cast<float>(bits);
}

// Columns k .. k + columns - 1, one group; fills the last step.
void quantize_group(const float* x, int64_t k, int64_t columns, float fine_above,
                    Int16RowWriter dst) noexcept {
  const float absmax = abs_max(x, columns);
  const bool fine = absmax > fine_above;
  const float limit = fine ? kInt16Fine : kInt16Coarse, d = absmax / limit;
  int32_t sum = 0;
  const int64_t padded = int16_steps(columns) * kInt16Step;
  for (int64_t c = 0; c < padded; ++c) {
    const float ratio = c >= columns || d == 0.0f ? 0.0f : x[c] / d;
    const float clamped = std::min(limit, ratio > -limit ? ratio : -limit);
    const auto value = static_cast<int32_t>(std::nearbyint(clamped));
    const int32_t high = (value + 128) >> 8;
    dst.planes[int16_position(k + c)] = static_cast<int8_t>(high);
    dst.planes[int16_position(k + c) + kInt16Step] = static_cast<int8_t>(value - 256 * high);
    sum += value;
  }
  dst.scale[k / kInt16Group] = d;
  dst.offset[k / kInt16Group] = -format::int8_g128::kOffset * sum;
  dst.fine[k / kInt16Group] = fine;
}

void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, float fine_above,
              std::byte* row) noexcept {
  const Int16RowWriter dst(row, in_features);
  for (int64_t k = first; k < first + count; k += kInt16Group)
    quantize_group(x + k - first, k, std::min(kInt16Group, first + count - k), fine_above, dst);
}

void gemm(const GemmArgs& args) noexcept {
  const int64_t in = args.shape.in_features;
  ref::each_output(
      args, format::WeightFormat::kInt8G128, [&](const std::byte* panel, int64_t row, const std::byte* act) {
        const Int16Row x(act, in);
        const int64_t r = row % format::kPanelRows;
        float total = 0.0f;
        for (int64_t g = 0; g < int16_groups(in); ++g) {
          int32_t dot = 0;
          for (int64_t k = g * kInt16Group; k < std::min(in, (g + 1) * kInt16Group); ++k) {
            const int8_t* plane = x.planes + int16_position(k);
            dot += format::int8_g128::decode_q(panel, r, k) * (256 * plane[0] + plane[kInt16Step]);
          }
          const float scale = format::int8_g128::decode_scale(panel, in, r, g) * x.scale[g];
          total = std::fma(static_cast<float>(dot), scale, total);
        }
        return total;
      });
}

}  // namespace

const Kernel kRefInt8G128 = {
    "ref.int8_g128", 0,   format::WeightFormat::kInt8G128, ActFormat::kInt16G128, format::int8_g128::reject,
    quantize,        gemm};

}  // namespace proa::gemm
