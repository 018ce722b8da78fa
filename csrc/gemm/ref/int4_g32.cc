#include "format/int4_g32.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "gemm/quantized_act.h"
#include "gemm/ref/each_output.h"
#include "gemm/ref/vec.h"
#include "gemm/registry.h"

namespace proa::gemm {
namespace {

const char* reject(const format::Shape& shape) noexcept {
  return shape.in_features % format::kInt4Group == 0 ? nullptr
                                                     : "in_features is not a multiple of the group of 32";
}

// As an integer maximum, so that a NaN wins over every number.
float abs_max(const float* x, int64_t n) noexcept {
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits = std::max(bits, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return std::bit_cast<float>(bits);
}

// Where column c of a group stands: evens, then odds of each 8.
int64_t position(int64_t c) noexcept { return c / 8 * 8 + c % 2 * 4 + c % 8 / 2; }

void quantize_group(const float* x, int8_t* q, float* scale, int32_t* offset) noexcept {
  const float d = abs_max(x, format::kInt4Group) / 127.0f;
  int32_t sum = 0;
  for (int64_t c = 0; c < format::kInt4Group; ++c) {
    const float ratio = d == 0.0f ? 0.0f : x[c] / d;
    const float clamped = std::min(127.0f, ratio > -127.0f ? ratio : -127.0f);
    const auto value = static_cast<int8_t>(std::nearbyint(clamped));
    q[position(c)] = value;
    sum += value;
  }
  *scale = d;
  *offset = -format::int4_g32::kOffset * sum;
}

void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, std::byte* row) noexcept {
  const QuantizedRowWriter dst = quantized_row_writer(row, in_features);
  for (int64_t k = first; k < first + count; k += format::kInt4Group)
    quantize_group(x + k - first, dst.q + k, dst.scale + k / format::kInt4Group,
                   dst.offset + k / format::kInt4Group);
}

void gemm(const GemmArgs& args) noexcept {
  const int64_t in = args.shape.in_features;
  ref::each_output(args, format::WeightFormat::kInt4G32,
                   [&](const std::byte* panel, int64_t row, const std::byte* act) {
                     const QuantizedRow x = quantized_row(act, in);
                     const int64_t r = row % format::kPanelRows;
                     float total = 0.0f;
                     for (int64_t g = 0; g < in / format::kInt4Group; ++g) {
                       int32_t dot = 0;
                       for (int64_t c = 0; c < format::kInt4Group; ++c) {
                         const int64_t k = g * format::kInt4Group;
                         dot += format::int4_g32::decode_q(panel, r, k + c) * x.q[k + position(c)];
                       }
                       const float scale = format::int4_g32::decode_scale(panel, r, g) * x.scale[g];
                       total = std::fma(static_cast<float>(dot), scale, total);
                     }
                     return total;
                   });
}

}  // namespace

const Kernel kRefInt4G32 = {"ref.int4_g32",      0,      format::WeightFormat::kInt4G32,
                            ActFormat::kInt8G32, reject, quantize,
                            ref::silu_mul,       gemm};

}  // namespace proa::gemm
