#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "format/int4_g32.h"
#include "gemm/panel.h"
#include "gemm/quantized_act.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")

namespace proa::gemm {
namespace avxvnni {
namespace {

#include "gemm/avx2/vec.h"
#include "gemm/exp-inl.h"
#include "gemm/silu-inl.h"

inline __m256i dot_quads(const __m256i (&quads)[8], const int8_t* q, int32_t offset) noexcept {
  __m256i dot = _mm256_set1_epi32(offset);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    int32_t quad;
    std::memcpy(&quad, q + 4 * j, 4);
    dot = _mm256_dpbusd_avx_epi32(dot, quads[j], _mm256_set1_epi32(quad));
  }
  return dot;
}

#include "gemm/avx2/int4_half-inl.h"

}  // namespace
}  // namespace avxvnni

const Kernel kAvxVnniInt4G32 = {"avxvnni.int4_g32",
                                cpu::kAvx2Tier | cpu::kAvxVnni,
                                format::WeightFormat::kInt4G32,
                                ActFormat::kInt8G32,
                                avxvnni::reject,
                                avxvnni::quantize,
                                avxvnni::silu_mul,
                                avxvnni::gemm};

}  // namespace proa::gemm

#pragma GCC pop_options
