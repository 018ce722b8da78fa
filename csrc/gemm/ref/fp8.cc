#include <algorithm>
#include <cmath>

#include "format/fp8_block128.h"
#include "format/fp8_channel.h"
#include "format/mxfp8.h"
#include "gemm/ref/each_output.h"
#include "gemm/registry.h"

namespace proa::gemm {
namespace {

void block128(const GemmArgs& args) noexcept {
  const int64_t in = args.shape.in_features;
  ref::each_output(args, format::WeightFormat::kFp8Block128,
                   [&](const std::byte* panel, int64_t row, const std::byte* act) {
                     const auto* x = reinterpret_cast<const float*>(act);
                     const float* scales = format::fp8_block128::block_scales(panel, in);
                     float total = 0.0f;
                     for (int64_t block = 0; block < format::ceil_div(in, format::kFp8Block); ++block) {
                       float sum = 0.0f;
                       const int64_t end = std::min(in, (block + 1) * format::kFp8Block);
                       for (int64_t k = block * format::kFp8Block; k < end; ++k)
                         sum = std::fma(format::fp8_block128::decode(panel, row % format::kPanelRows, k),
                                        x[k], sum);
                       total = std::fma(sum, scales[block], total);
                     }
                     return total;
                   });
}

void channel(const GemmArgs& args) noexcept {
  ref::each_output(args, format::WeightFormat::kFp8Channel,
                   [&](const std::byte* panel, int64_t row, const std::byte* act) {
                     const auto* x = reinterpret_cast<const float*>(act);
                     const int64_t r = row % format::kPanelRows;
                     float total = 0.0f;
                     for (int64_t k = 0; k < args.shape.in_features; ++k)
                       total = std::fma(format::fp8_channel::decode(panel, r, k), x[k], total);
                     return total * format::fp8_channel::row_scales(panel, args.shape.in_features)[r];
                   });
}

void mxfp8(const GemmArgs& args) noexcept {
  ref::each_output(
      args, format::WeightFormat::kMxFp8, [&](const std::byte* panel, int64_t row, const std::byte* act) {
        const auto* x = reinterpret_cast<const float*>(act);
        float total = 0.0f;
        for (int64_t k = 0; k < args.shape.in_features; ++k)
          total = std::fma(format::mxfp8::decode(panel, row % format::kPanelRows, k), x[k], total);
        return total;
      });
}

constexpr Kernel fp8_kernel(const char* name, format::WeightFormat weight,
                            const char* (*reject_shape)(const format::Shape&) noexcept,
                            void (*gemm_fn)(const GemmArgs&) noexcept) {
  return {name, 0, weight, ActFormat::kF32, reject_shape, nullptr, gemm_fn};
}

}  // namespace

using format::WeightFormat;

const Kernel kRefFp8Block128 =
    fp8_kernel("ref.fp8_block128", WeightFormat::kFp8Block128, format::any_shape, block128);
const Kernel kRefFp8Channel =
    fp8_kernel("ref.fp8_channel", WeightFormat::kFp8Channel, format::any_shape, channel);
const Kernel kRefMxFp8 = fp8_kernel("ref.mxfp8", WeightFormat::kMxFp8, format::mxfp8::reject, mxfp8);

}  // namespace proa::gemm
