// Grouped formats with f32 activations.
#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

#include "gemm/grouped_cells.h"
#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace proa::gemm {
namespace avx2 {
namespace {

// 6 accumulators of two registers, two weights and a broadcast of the 16 registers.
constexpr int kPanels = 1;
constexpr int kTokens = 6;
constexpr int kStreams = 4;

#include "gemm/avx2/grouped_codes-inl.h"
#include "gemm/avx2/vec.h"
#include "gemm/avx2/vec_grouped-inl.h"
#include "gemm/f32_act-inl.h"

struct Cells {
  static constexpr char kPrefix[] = "avx2.f32_act.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name,    cpu::kAvx2Tier,  F::kFormat, ActFormat::kF32, format::reject_grouped<F>,
            nullptr, gemm<Grouped<F>>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(format::GroupedFormats{});

}  // namespace
}  // namespace avx2

std::span<const Kernel> avx2_grouped_f32_cells() noexcept { return avx2::kCells; }

}  // namespace proa::gemm

#pragma GCC pop_options
