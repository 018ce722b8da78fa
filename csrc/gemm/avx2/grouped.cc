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
#pragma GCC target("avx2,fma,f16c")

namespace proa::gemm {
namespace avx2 {
namespace {

#include "gemm/avx2/vec.h"

struct Bytes {
  using Reg = __m256i;
  static Reg zero() { return _mm256_setzero_si256(); }
  static Reg set_quad(int32_t quad) { return _mm256_set1_epi32(quad); }
  static Reg set_words(int16_t value) { return _mm256_set1_epi16(value); }
  static Reg multiply(Reg u, Reg q) { return _mm256_maddubs_epi16(u, q); }
  static Reg widen(Reg pairs, Reg factor) { return _mm256_madd_epi16(pairs, factor); }
  static Reg add16(Reg a, Reg b) { return _mm256_add_epi16(a, b); }
  static Reg add32(Reg a, Reg b) { return _mm256_add_epi32(a, b); }
  static Reg upper7(Reg u) { return _mm256_and_si256(_mm256_srli_epi16(u, 1), _mm256_set1_epi8(0x7f)); }
  static Reg lowest(Reg u) { return _mm256_and_si256(u, _mm256_set1_epi8(1)); }
};

#include "gemm/avx2/grouped-inl.h"
#include "gemm/byte_dot-inl.h"

struct Cells {
  static constexpr char kPrefix[] = "avx2.";
  template <class F>
  static constexpr Kernel cell(const char* name) noexcept {
    return {name,        cpu::kAvx2Tier, F::kFormat, kGroupedAct<F>, format::reject_grouped<F>,
            quantize<F>, gemm<F>};
  }
};

constexpr auto kCells = grouped_cells<Cells>(format::GroupedFormats{});

}  // namespace
}  // namespace avx2

std::span<const Kernel> avx2_grouped_cells() noexcept { return avx2::kCells; }

}  // namespace proa::gemm

#pragma GCC pop_options
