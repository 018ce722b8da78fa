#include "format/fp8_block128.h"

#include <algorithm>
#include <cmath>

#include "gemm/ref/each_output.h"
#include "gemm/ref/vec.h"
#include "gemm/registry.h"

namespace proa::gemm {
namespace {

const char* reject(const format::Shape&) noexcept { return nullptr; }

void gemm(const GemmArgs& args) noexcept {
  const int64_t in = args.shape.in_features;
  const int64_t blocks = format::ceil_div(in, format::kFp8Block);
  ref::each_output(args, format::WeightFormat::kFp8Block128,
                   [&](const std::byte* panel, int64_t row, const std::byte* act) {
                     const auto* x = reinterpret_cast<const float*>(act);
                     const float* scales = format::fp8_block128::block_scales(panel, in);
                     float total = 0.0f;
                     for (int64_t block = 0; block < blocks; ++block) {
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

}  // namespace

const Kernel kRefFp8Block128 = {"ref.fp8_block128", 0,      format::WeightFormat::kFp8Block128,
                                ActFormat::kF32,    reject, nullptr,
                                ref::silu_mul,      gemm};

}  // namespace proa::gemm
