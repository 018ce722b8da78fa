#include <immintrin.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "gemm/grouped_cells.h"
#include "gemm/grouped_panels.h"
#include "gemm/grouped_tokens.h"
#include "gemm/panel.h"
#include "gemm/quantized_act.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avxvnni")

namespace proa::gemm {
namespace avxvnni {
namespace {

#include "gemm/avx2/vec.h"

template <class F>
inline __m256i dot_quads(__m256i dot, const __m256i (&quads)[8], int first, int count,
                         const int8_t* q) noexcept {
#pragma GCC unroll 8
  for (int j = first; j < first + count; ++j) {
    int32_t quad;
    std::memcpy(&quad, q + 4 * j, 4);
    dot = _mm256_dpbusd_avx_epi32(dot, quads[j], _mm256_set1_epi32(quad));
  }
  return dot;
}

#include "gemm/avx2/grouped-inl.h"

struct Cells {
  static constexpr char kPrefix[] = "avxvnni.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name,           cpu::kAvx2Tier | cpu::kAvxVnni, F::kFormat,
            kGroupedAct<F>, format::reject_grouped<F>,      quantize<F>,
            gemm<F>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(format::GroupedFormats{});

}  // namespace
}  // namespace avxvnni

std::span<const Kernel> avx_vnni_grouped_cells() noexcept { return avxvnni::kCells; }

}  // namespace proa::gemm

#pragma GCC pop_options
