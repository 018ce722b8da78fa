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
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace avx512_vnni {
namespace {

#include "gemm/avx512/vec.h"

// At 16: the totals, 8 quads, the scale and temporaries of the 32 registers.
constexpr int kTokenCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14};
constexpr int kBlockTokens = 16;

template <class F>
inline __m512i dot_quads(__m512i dot, const __m512i (&quads)[8], int first, int count,
                         const int8_t* q) noexcept {
#pragma GCC unroll 8
  for (int j = first; j < first + count; ++j) {
    int32_t quad;
    std::memcpy(&quad, q + 4 * j, 4);
    dot = _mm512_dpbusd_epi32(dot, quads[j], _mm512_set1_epi32(quad));
  }
  return dot;
}

#include "gemm/avx512/grouped-inl.h"

struct Cells {
  static constexpr char kPrefix[] = "avx512.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name,           cpu::kAvx512Tier | cpu::kAvx512Vnni, F::kFormat,
            kGroupedAct<F>, format::reject_grouped<F>,           quantize<F>,
            gemm<F>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(format::GroupedFormats{});

}  // namespace
}  // namespace avx512_vnni

std::span<const Kernel> avx512_vnni_grouped_cells() noexcept { return avx512_vnni::kCells; }

}  // namespace proa::gemm

#pragma GCC pop_options
