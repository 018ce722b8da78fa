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
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace avx512 {
namespace {

#include "gemm/avx512/vec.h"
#include "gemm/exp-inl.h"
#include "gemm/silu-inl.h"

using format::kInt4Group;
using format::int4_g32::kBlockBytes;

// 16 totals, 8 unpacked words, the scales and two temporaries of the 32 registers.
constexpr int kTokens = 16;
constexpr int64_t kPrefetchBytes = 4096;

const char* reject(const format::Shape& shape) noexcept {
  return shape.in_features % kInt4Group == 0 ? nullptr : "in_features is not a multiple of the group of 32";
}

void quantize_group(const float* x, int8_t* q, float* scale, int32_t* offset) noexcept {
  const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
  // As integers, so that a NaN wins over every number.
  const __m512i sign_off = _mm512_set1_epi32(0x7fffffff);
  const __m512i magnitude = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), sign_off),
                                             _mm512_and_si512(_mm512_castps_si512(b), sign_off));
  const float d = std::bit_cast<float>(_mm512_reduce_max_epu32(magnitude)) / 127.0f;
  const __mmask16 nonzero = d == 0.0f ? 0 : 0xffff;
  const __m512 divisor = _mm512_set1_ps(d), low = _mm512_set1_ps(-127.0f), high = _mm512_set1_ps(127.0f);
  const __m512 ra = _mm512_min_ps(high, _mm512_max_ps(_mm512_maskz_div_ps(nonzero, a, divisor), low));
  const __m512 rb = _mm512_min_ps(high, _mm512_max_ps(_mm512_maskz_div_ps(nonzero, b, divisor), low));
  const __m512i ia = _mm512_cvtps_epi32(ra), ib = _mm512_cvtps_epi32(rb);
  *scale = d;
  *offset = -format::int4_g32::kOffset * _mm512_reduce_add_epi32(_mm512_add_epi32(ia, ib));
  // Of each 8 bytes: the even ones, then the odd ones.
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(ib), _mm512_cvtepi32_epi8(ia));
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_shuffle_epi8(bytes, order));
}

// One 288-byte block as 8 u8 quads per row and its scales.
struct Block {
  __m512i quads[8];
  __m512 scales;
};

inline Block load_block(const std::byte* block) noexcept {
  Block result;
  const __m512i low_nibble = _mm512_set1_epi8(0x0f);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512i word = _mm512_loadu_si512(block + 64 * j);
    result.quads[2 * j] = _mm512_and_si512(word, low_nibble);
    result.quads[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(word, 4), low_nibble);
  }
  const __m256i bits =
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + format::int4_g32::kNibbleBytes));
  result.scales = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  return result;
}

template <int M>
void multiply_panel(const std::byte* panel, int64_t groups, const QuantizedRow* x, float* out,
                    int64_t out_stride, int lanes) noexcept {
  Vec total[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m] = Vec::zero();
  for (int64_t g = 0; g < groups; ++g, panel += kBlockBytes) {
    // Panels follow each other, so past the end of this one is the start of the next.
#pragma GCC unroll 5
    for (int line = 0; line < 5; ++line)
      _mm_prefetch(reinterpret_cast<const char*>(panel + kPrefetchBytes + 64 * line), _MM_HINT_T0);
    const Block block = load_block(panel);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      __m512i dot = _mm512_set1_epi32(x[m].offset[g]);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        int32_t quad;
        std::memcpy(&quad, x[m].q + g * kInt4Group + 4 * j, 4);
        dot = _mm512_dpbusd_epi32(dot, block.quads[j], _mm512_set1_epi32(quad));
      }
      const __m512 scale = _mm512_mul_ps(block.scales, _mm512_set1_ps(x[m].scale[g]));
      total[m].v = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, total[m].v);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) total[m].store_first(out + m * out_stride, lanes);
}

#include "gemm/int4_act-inl.h"

}  // namespace
}  // namespace avx512

const Kernel kAvx512Int4G32 = {"avx512.int4_g32",
                               cpu::kAvx512Tier | cpu::kAvx512Vnni,
                               format::WeightFormat::kInt4G32,
                               ActFormat::kInt8G32,
                               avx512::reject,
                               avx512::quantize,
                               avx512::silu_mul,
                               avx512::gemm};

}  // namespace proa::gemm

#pragma GCC pop_options
