// Grouped formats with f32 activations.
#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

#include "gemm/grouped_cells.h"
#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace avx512 {
namespace {

// 2 x 12 accumulators, 2 weights and a broadcast of the 32 registers.
constexpr int kPanels = 2;
constexpr int kTokens = 12;
constexpr int kStreams = 4;

#include "gemm/avx512/grouped_codes-inl.h"
#include "gemm/avx512/vec.h"
#include "gemm/avx512/vec_grouped-inl.h"
#include "gemm/f32_act-inl.h"

struct Cells {
  static constexpr char kPrefix[] = "avx512.f32_act.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name,    cpu::kAvx512Tier, F::kFormat, ActFormat::kF32, format::reject_grouped<F>,
            nullptr, gemm<Grouped<F>>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(format::GroupedFormats{});

}  // namespace
}  // namespace avx512

std::span<const Kernel> avx512_grouped_f32_cells() noexcept { return avx512::kCells; }

}  // namespace proa::gemm

#pragma GCC pop_options
