#include <algorithm>
#include <bit>
#include <cmath>

#include "gemm/grouped_cells.h"
#include "gemm/quantized_act.h"
#include "gemm/ref/each_output.h"
#include "gemm/registry.h"

namespace proa::gemm {
namespace {

using format::kGroup;

// As an integer maximum, so that a NaN wins over every number.
float abs_max(const float* x, int64_t n) noexcept {
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) bits = std::max(bits, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return std::bit_cast<float>(bits);
}

// Returns whether the group is fine.
bool quantize_group(const float* x, float fine_above, int8_t* q, int8_t* high, float* scale,
                    int32_t (&halves)[2]) noexcept {
  const float absmax = abs_max(x, kGroup);
  const bool fine = absmax > fine_above;
  const float limit = fine ? kTwoPlanes : kOnePlane, d = absmax / limit;
  halves[0] = halves[1] = 0;
  for (int64_t c = 0; c < kGroup; ++c) {
    const float ratio = d == 0.0f ? 0.0f : x[c] / d;
    const float clamped = std::min(limit, ratio > -limit ? ratio : -limit);
    const auto value = static_cast<int32_t>(std::nearbyint(clamped));
    const int32_t upper = fine ? (value + 4) >> kHighShift : 0;
    if (fine) high[format::quad_position(c)] = static_cast<int8_t>(upper);
    q[format::quad_position(c)] = static_cast<int8_t>(value - (upper << kHighShift));
    halves[c / 16] += value;
  }
  *scale = d;
  return fine;
}

float sum_16(const float* x) noexcept {
  float sums[16];
  std::copy_n(x, 16, sums);
  for (int64_t n = 8; n > 0; n /= 2)
    for (int64_t i = 0; i < n; ++i) sums[i] += sums[i + n];
  return sums[0];
}

template <class F>
void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, float fine_above,
              std::byte* row) noexcept {
  const QuantizedRowWriter dst = quantized_row_writer<F>(row, in_features);
  for (int64_t k = first; k < first + count; k += kGroup) {
    const int64_t g = k / kGroup;
    GroupSums sums;
    dst.fine[g] = quantize_group(x + k - first, fine_above, dst.q + k, dst.high + k, dst.scale + g, sums.v);
    sums.x[0] = sum_16(x + k - first);
    sums.x[1] = sum_16(x + k - first + 16);
    write_sums<F>(dst.scale[g], sums, g, in_features, dst.sums);
  }
}

// The columns of one weight scale of one group, from column k on: `total` with what they add.
template <class F>
float add_part(const format::GroupedPanel<F>& weight, int64_t row, int64_t k, const QuantizedRow& x,
               float total) noexcept {
  constexpr int64_t kHalves = format::GroupedLayout<F>::kHalves;
  const int64_t group = k / kGroup, part = group * kHalves + k % kGroup / (kGroup / kHalves);
  int32_t dot = F::kMinimum ? 0 : x.offset[part];
  for (int64_t c = k; c < k + kGroup / kHalves; ++c) {
    const int64_t at = group * kGroup + format::quad_position(c % kGroup);
    dot += weight.code(row, c) * (x.fine[group] ? (x.high[at] << kHighShift) + x.q[at] : x.q[at]);
  }
  total = std::fma(static_cast<float>(dot), weight.scale(row, k) * x.scale[group], total);
  if constexpr (!F::kMinimum) return total;
  total = std::fma(weight.minimum(row, k), x.sum[part], total);
  return std::fma(weight.scale(row, k), x.rest[part], total);
}

template <class F>
void gemm(const GemmArgs& args) noexcept {
  const int64_t in = args.shape.in_features;
  ref::each_output(args, F::kFormat, [&](const std::byte* panel, int64_t row, const std::byte* act) {
    const format::GroupedPanel<F> weight(panel, in);
    const QuantizedRow x = quantized_row<F>(act, in);
    const int64_t r = row % format::kPanelRows;
    float total = 0.0f;
    for (int64_t k = 0; k < in; k += kGroup / format::GroupedLayout<F>::kHalves)
      total = add_part<F>(weight, r, k, x, total);
    return F::kRowScale ? total * weight.row_scale(r) : total;
  });
}

// With f32 activations a weight is one float: code times scale is exact, a minimum costs one rounding.
template <class F>
void gemm_f32(const GemmArgs& args) noexcept {
  const int64_t in = args.shape.in_features;
  ref::each_output(args, F::kFormat, [&](const std::byte* panel, int64_t row, const std::byte* act) {
    const format::GroupedPanel<F> weight(panel, in);
    const auto* x = reinterpret_cast<const float*>(act);
    const int64_t r = row % format::kPanelRows;
    float total = 0.0f;
    for (int64_t k = 0; k < in; ++k) {
      const float product = static_cast<float>(weight.code(r, k) - F::kOffset) * weight.scale(r, k);
      total = std::fma(F::kMinimum ? product + weight.minimum(r, k) : product, x[k], total);
    }
    return F::kRowScale ? total * weight.row_scale(r) : total;
  });
}

struct Cells {
  static constexpr char kPrefix[] = "ref.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name, 0, F::kFormat, kGroupedAct<F>, format::reject_grouped<F>, quantize<F>, gemm<F>};
  }
};

struct F32Cells {
  static constexpr char kPrefix[] = "ref.f32_act.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name, 0, F::kFormat, ActFormat::kF32, format::reject_grouped<F>, nullptr, gemm_f32<F>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(format::GroupedFormats{});
constexpr auto kF32Cells = grouped_cells<F32Cells>(format::GroupedFormats{});

}  // namespace

std::span<const Kernel> ref_grouped_cells() noexcept { return kCells; }
std::span<const Kernel> ref_grouped_f32_cells() noexcept { return kF32Cells; }

}  // namespace proa::gemm
