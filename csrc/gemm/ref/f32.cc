#include "format/f32.h"

#include <cmath>

#include "gemm/ref/each_output.h"
#include "gemm/registry.h"

namespace proa::gemm {
namespace {

const char* reject(const format::Shape&) noexcept { return nullptr; }

void gemm(const GemmArgs& args) noexcept {
  ref::each_output(args, format::WeightFormat::kF32,
                   [&](const std::byte* panel, int64_t row, const std::byte* act) {
                     const auto* x = reinterpret_cast<const float*>(act);
                     float total = 0.0f;
                     for (int64_t k = 0; k < args.shape.in_features; ++k)
                       total = std::fma(format::f32::decode(panel, row % format::kPanelRows, k), x[k], total);
                     return total;
                   });
}

}  // namespace

const Kernel kRefF32 = {"ref.f32", 0, format::WeightFormat::kF32, ActFormat::kF32, reject, nullptr, gemm};

}  // namespace proa::gemm
