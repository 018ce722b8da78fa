#include "format/f16.h"

#include <cmath>

#include "gemm/ref/each_output.h"
#include "gemm/registry.h"

namespace proa::gemm {
namespace {

const char* reject(const format::Shape&) noexcept { return nullptr; }

void gemm(const GemmArgs& args) noexcept {
  ref::each_output(args, format::WeightFormat::kF16,
                   [&](const std::byte* panel, int64_t row, const std::byte* act) {
                     const auto* x = reinterpret_cast<const float*>(act);
                     float total = 0.0f;
                     for (int64_t k = 0; k < args.shape.in_features; ++k)
                       total = std::fma(format::f16::decode(panel, row % format::kPanelRows, k), x[k], total);
                     return total;
                   });
}

}  // namespace

const Kernel kRefF16 = {"ref.f16", 0, format::WeightFormat::kF16, ActFormat::kF32, reject, nullptr, gemm};

}  // namespace proa::gemm
