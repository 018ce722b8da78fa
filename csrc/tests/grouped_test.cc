// Grouped formats at their limits, in every cell this CPU can run: all codes and scales, the largest sums,
// scales that are not finite.
#include <cmath>
#include <limits>
#include <string>

#include "format/grouped_formats.h"
#include "tests/check.h"
#include "tests/kernel_case.h"

namespace {

using namespace proa;
using format::GroupedLayout;
using test::Case;
using test::multiply;

// Runs `check(kernel, out)` for every cell of F with int8 activations.
template <class F, class Check>
void for_each_cell(const Case& c, std::span<const std::byte> packed, const std::vector<float>& x,
                   Check check) {
  std::vector<int32_t> index;
  for (int32_t t = 0; t < c.tokens; ++t) index.push_back(t);
  for (const gemm::Kernel* kernel : gemm::all_kernels())
    for (const test::Fine fine : {test::Fine::kNone, test::Fine::kAll})
      if (kernel->weight == F::kFormat && test::runnable(*kernel) && gemm::is_int8(kernel->act))
        check(*kernel, fine, multiply(*kernel, c, packed, x, index, fine));
}

float e2m1(int code) {
  constexpr float kValues[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code < 8 ? kValues[code] : -kValues[code - 8];
}

// Row r: one weight of each code in column `code` of a group whose scale is byte r; x is 127 in one column
// (quantized exactly, d = 1), so an output is 127 * value.
template <class F>
void every_code_and_scale(float (*scale_of)(uint8_t), float global) {
  constexpr int64_t kIn = 64, kScales = kIn / F::kScaleColumns;
  const format::Shape shape{256, kIn};
  test::CheckpointWeight source{shape, std::vector<std::byte>(256 * kIn / 2), {}, global};
  for (int64_t r = 0; r < 256; ++r) {
    for (int64_t b = 0; b < 8; ++b)
      source.data[static_cast<size_t>(r * kIn / 2 + b)] = static_cast<std::byte>((2 * b + 1) << 4 | 2 * b);
    for (int64_t s = 0; s < kScales; ++s) source.scales.push_back(static_cast<std::byte>(s == 0 ? r : 1));
  }
  const test::PackedMemory packed(F::kFormat, source);
  for (int code = 0; code < 16; ++code) {
    std::vector<float> x(2 * kIn);
    x[static_cast<size_t>(code)] = x[static_cast<size_t>(kIn + code)] = 127.0f;
    for (const int64_t tokens : {1, 2})
      for_each_cell<F>({shape, tokens, 0, 16}, packed.bytes(), x,
                       [&](const gemm::Kernel& kernel, test::Fine, const auto& out) {
                         int wrong = 0;
                         for (size_t r = 0; r < 256; ++r) {
                           const double scale = scale_of(static_cast<uint8_t>(r));
                           const float expected = static_cast<float>(127.0 * e2m1(code) * scale) * global;
                           wrong += std::isnan(scale) ? !std::isnan(out[r]) : out[r] != expected;
                         }
                         if (wrong > 0)
                           test::report(false, __FILE__, __LINE__,
                                        std::string(kernel.name) + ": wrong values");
                       });
  }
}

// The code bytes of all groups of a packed weight become `byte`.
template <class F>
void fill_codes(std::span<std::byte> packed, int64_t panels, int64_t in, std::byte byte) {
  using Layout = GroupedLayout<F>;
  const int64_t panel_bytes = format::panel_bytes(F::kFormat, in);
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t first = 0; first < in / format::kGroup; first += Layout::kGroups) {
      const int64_t groups = std::min(Layout::kGroups, in / format::kGroup - first);
      std::byte* super = packed.data() + panel * panel_bytes +
                         first / Layout::kGroups * Layout::super_bytes(Layout::kGroups);
      std::fill_n(super, groups * Layout::kGroupBytes, byte);
    }
}

// The largest code everywhere and |q| = 127 of every sign pattern: the largest sums an int16 path meets.
template <class F>
void largest_sums(test::Rng& rng) {
  const format::Shape shape{32, 512};
  const auto source = test::random_weight(rng, F::kFormat, shape);
  const test::PackedMemory packed(F::kFormat, source);
  std::vector<float> x(4 * 512), w(32 * 512);
  for (size_t i = 0; i < 512; ++i) {
    x[i] = 127.0f;
    x[512 + i] = -127.0f;
    x[1024 + i] = i % 2 == 0 ? 127.0f : -127.0f;
    x[1536 + i] = i % 16 < 8 ? 127.0f : -127.0f;
  }
  for (const int byte : {F::kCodes == format::CodeKind::kE2m1 ? 0x77 : 0xff, 0x00}) {
    fill_codes<F>(packed.bytes(), 2, 512, static_cast<std::byte>(byte));
    format::unpack(F::kFormat, shape, packed.bytes(), w);
    for_each_cell<F>({shape, 4, 0, 2}, packed.bytes(), x,
                     [&](const gemm::Kernel& kernel, test::Fine, const auto& out) {
                       int wrong = 0;
                       for (size_t t = 0; t < 4; ++t)
                         for (size_t r = 0; r < 32; ++r) {
                           double sum = 0.0, size = 0.0;
                           for (size_t k = 0; k < 512; ++k) {
                             sum += double{w[r * 512 + k]} * x[t * 512 + k];
                             size += std::fabs(double{w[r * 512 + k]} * x[t * 512 + k]);
                           }
                           // A minimum may cancel most of what a code stands for: each is at most the largest
                           // code times as much.
                           const double slack = F::kMinimum ? 2.0 * (1 << F::kBits) : 1.0;
                           wrong += std::fabs(out[t * 35 + r] - sum) > 515 * 0x1p-24 * slack * size;
                         }
                       if (wrong > 0)
                         test::report(false, __FILE__, __LINE__, std::string(kernel.name) + ": wrong sums");
                     });
  }
}

// One scale of row 3 is infinite, NaN or the smallest number: all cells agree with the scalar one, and other
// rows are finite.
template <class F>
void odd_scales(test::Rng& rng) {
  if constexpr (format::is_sub(F::kScale)) return;
  const format::Shape shape{32, 256};
  const auto source = test::random_weight(rng, F::kFormat, shape);
  const auto x = test::random_floats(rng, 2 * 256);
  using Scale = typename format::GroupedRow<F>::Scale;
  const Scale bits[] = {F::kScale == format::ScaleKind::kBf16 ? Scale(0x7f80) : Scale(0x7c00),
                        static_cast<Scale>(0x7fff), static_cast<Scale>(0xff), static_cast<Scale>(1), 0};
  for (const Scale value : bits) {
    const test::PackedMemory packed(F::kFormat, source);
    const int64_t groups = std::min<int64_t>(GroupedLayout<F>::kGroups, 8);
    std::memcpy(packed.bytes().data() + GroupedLayout<F>::scale_offset(groups) + 3 * sizeof(Scale), &value,
                sizeof(Scale));
    for_each_cell<F>({shape, 2, 0, 2}, packed.bytes(), x,
                     [&](const gemm::Kernel& kernel, test::Fine fine, const auto& out) {
                       const auto expected = multiply(test::scalar_kernel(F::kFormat), {shape, 2, 0, 2},
                                                      packed.bytes(), x, {0, 1}, fine);
                       int wrong = 0;
                       for (size_t i = 0; i < out.size(); ++i) {
                         wrong += std::isnan(expected[i]) ? !std::isnan(out[i]) : out[i] != expected[i];
                         wrong += i % 35 != 3 && !std::isfinite(out[i]);
                       }
                       if (wrong > 0)
                         test::report(false, __FILE__, __LINE__, std::string(kernel.name) + ": odd scales");
                     });
  }
}

// A minimum meets the sum of x, not of what rounding left, and so does the middle code times the scale: the
// scalar cell against float64 within 5 eps a product and a step per scale.
template <class F>
void sums_of_x_are_exact(test::Rng& rng, test::Fine fine) {
  if constexpr (!F::kMinimum) return;
  constexpr int64_t kIn = 256, kPart = F::kScaleColumns < 32 ? F::kScaleColumns : 32;
  const format::Shape shape{32, kIn};
  const test::PackedMemory packed(F::kFormat, test::random_weight(rng, F::kFormat, shape));
  const auto x = test::random_floats(rng, kIn);
  const auto out = multiply(test::scalar_kernel(F::kFormat), {shape, 1, 0, 2}, packed.bytes(), x, {0}, fine);
  int wrong = 0;
  for (int64_t r = 0; r < 32; ++r) {
    const format::GroupedPanel<F> panel(packed.bytes().data() + r / 16 * format::panel_bytes(F::kFormat, kIn),
                                        kIn);
    double sum = 0.0, size = 0.0;
    for (int64_t k = 0; k < kIn; ++k) {
      const int64_t group = k / 32 * 32;
      float absmax = 0.0f;
      for (int64_t c = group; c < group + 32; ++c)
        absmax = std::max(absmax, std::fabs(x[static_cast<size_t>(c)]));
      const float d = absmax / (absmax > test::fine_above(fine, 0) ? 1016.0f : 127.0f);
      const double value = x[static_cast<size_t>(k)];
      const double rounded = std::nearbyint(x[static_cast<size_t>(k)] / d) * double{d};
      const double middle = format::kLargestCode<F> / 2.0, scale = panel.scale(r % 16, k);
      sum += (panel.code(r % 16, k) - middle) * scale * rounded;
      sum += (middle * scale + double{panel.minimum(r % 16, k)}) * value;
      size += (2 * format::kLargestCode<F> * std::fabs(scale) + std::fabs(double{panel.minimum(r % 16, k)})) *
              std::fabs(value);
    }
    wrong += std::fabs(out[static_cast<size_t>(r)] - sum) > (5 + 3 * kIn / kPart) * 0x1p-24 * size;
  }
  if (wrong > 0) test::report(false, __FILE__, __LINE__, std::string(F::kName) + ": wrong sums of x");
}

template <class... F>
void every_format(test::Rng& rng, format::FormatList<F...>) {
  (largest_sums<F>(rng), ...);
  (odd_scales<F>(rng), ...);
  for (const test::Fine fine : {test::Fine::kNone, test::Fine::kSome, test::Fine::kAll})
    (sums_of_x_are_exact<F>(rng, fine), ...);
}

}  // namespace

int main() {
  test::Rng rng(5);
  every_code_and_scale<format::MxFp4>(base::e8m0_to_f32, 1.0f);
  every_code_and_scale<format::NvFp4>(base::fp8_e4m3_to_f32, 0.5f);
  every_format(rng, format::GroupedFormats{});
  return test::result();
}
