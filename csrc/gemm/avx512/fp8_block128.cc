#include "format/fp8_block128.h"

#include <immintrin.h>

#include <array>
#include <cstring>
#include <limits>
#include <utility>

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

#include "gemm/avx512/vec.h"
#include "gemm/exp-inl.h"
#include "gemm/f32_act-inl.h"
#include "gemm/silu-inl.h"

struct Fp8Block128 {
  static constexpr auto kFormat = format::WeightFormat::kFp8Block128;
  static constexpr int64_t kColumnBytes = format::fp8_block128::kColumnBytes;
  static constexpr bool kScaled = true;

  // Moving exponent and mantissa up 20 bits gives the value times 2^-120, a subnormal one for the smallest;
  // the product with 2^120 is exact. The one NaN pattern becomes 480 that way and is replaced.
  static Vec load(const std::byte* column) {
    const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(column)));
    const __m512i magnitude = _mm512_and_si512(byte, _mm512_set1_epi32(0x7f));
    const __m512i sign = _mm512_slli_epi32(_mm512_sub_epi32(byte, magnitude), 24);
    const __m512i bits = _mm512_or_si512(_mm512_slli_epi32(magnitude, 20), sign);
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f));
    const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    return {_mm512_mask_mov_ps(value, is_nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()))};
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace avx512

const Kernel kAvx512Fp8Block128 = {"avx512.fp8_block128",
                                   cpu::kAvx512Tier,
                                   format::WeightFormat::kFp8Block128,
                                   ActFormat::kF32,
                                   avx512::reject,
                                   nullptr,
                                   avx512::silu_mul,
                                   avx512::gemm<avx512::Fp8Block128>};

}  // namespace proa::gemm

#pragma GCC pop_options
