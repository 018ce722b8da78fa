#include "format/int4_g32.h"

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "gemm/panel.h"
#include "gemm/quantized_act.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace proa::gemm {
namespace avx2 {
namespace {

#include "gemm/avx2/vec.h"
#include "gemm/exp-inl.h"
#include "gemm/silu-inl.h"

// u <= 15 and |q| <= 127: a pair is at most 3810, and the sum of 8 pairs at most 30480, so int16 never
// saturates.
inline __m256i dot_quads(const __m256i (&quads)[8], const int8_t* q, int32_t offset) noexcept {
  __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    int32_t quad;
    std::memcpy(&quad, q + 4 * j, 4);
    pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(quads[j], _mm256_set1_epi32(quad)));
  }
  return _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), _mm256_set1_epi32(offset));
}

#include "gemm/avx2/int4_half-inl.h"

}  // namespace
}  // namespace avx2

const Kernel kAvx2Int4G32 = {"avx2.int4_g32",     cpu::kAvx2Tier, format::WeightFormat::kInt4G32,
                             ActFormat::kInt8G32, avx2::reject,   avx2::quantize,
                             avx2::silu_mul,      avx2::gemm};

}  // namespace proa::gemm

#pragma GCC pop_options
