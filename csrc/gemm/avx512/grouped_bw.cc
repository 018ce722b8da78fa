// For CPUs without VNNI (Skylake-X, Cascade Lake's predecessors): byte products with vpmaddubsw.
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
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace avx512_bw {
namespace {

#include "gemm/avx512/vec.h"

constexpr int kTokenCounts[] = {1, 2, 3, 4, 6, 8};
constexpr int kBlockTokens = 12;

struct Bytes {
  using Reg = __m512i;
  static Reg zero() { return _mm512_setzero_si512(); }
  static Reg set_quad(int32_t quad) { return _mm512_set1_epi32(quad); }
  static Reg set_words(int16_t value) { return _mm512_set1_epi16(value); }
  static Reg multiply(Reg u, Reg q) { return _mm512_maddubs_epi16(u, q); }
  static Reg widen(Reg pairs, Reg factor) { return _mm512_madd_epi16(pairs, factor); }
  static Reg add16(Reg a, Reg b) { return _mm512_add_epi16(a, b); }
  static Reg add32(Reg a, Reg b) { return _mm512_add_epi32(a, b); }
  static Reg upper7(Reg u) { return _mm512_and_si512(_mm512_srli_epi16(u, 1), _mm512_set1_epi8(0x7f)); }
  static Reg lowest(Reg u) { return _mm512_and_si512(u, _mm512_set1_epi8(1)); }
};

#include "gemm/avx512/grouped-inl.h"
#include "gemm/byte_dot-inl.h"

struct Cells {
  static constexpr char kPrefix[] = "avx512bw.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name,        cpu::kAvx512Tier, F::kFormat, kGroupedAct<F>, format::reject_grouped<F>,
            quantize<F>, gemm<F>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(format::GroupedFormats{});

}  // namespace
}  // namespace avx512_bw

std::span<const Kernel> avx512_bw_grouped_cells() noexcept { return avx512_bw::kCells; }

}  // namespace proa::gemm

#pragma GCC pop_options
