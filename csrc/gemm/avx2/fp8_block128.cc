#include "format/fp8_block128.h"

#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace proa::gemm {
namespace avx2 {
namespace {

// 6 accumulators of two registers, two weights and a broadcast of the 16 registers.
constexpr int kPanels = 1;
constexpr int kTokens = 6;
constexpr int kStreams = 4;

#include "gemm/avx2/vec.h"
#include "gemm/exp-inl.h"
#include "gemm/f32_act-inl.h"
#include "gemm/silu-inl.h"

struct Fp8Block128 {
  static constexpr auto kFormat = format::WeightFormat::kFp8Block128;
  static constexpr int64_t kColumnBytes = format::fp8_block128::kColumnBytes;
  static constexpr bool kScaled = true;

  // Moving exponent and mantissa up 20 bits gives the value times 2^-120, a subnormal one for the smallest;
  // the product with 2^120 is exact. The one NaN pattern becomes 480 that way; setting all its bits makes it
  // a NaN again.
  static Vec load(const std::byte* column) { return {load8(column), load8(column + 8)}; }
  static __m256 load8(const std::byte* column) {
    const __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(column)));
    const __m256i magnitude = _mm256_and_si256(byte, _mm256_set1_epi32(0x7f));
    const __m256i sign = _mm256_slli_epi32(_mm256_sub_epi32(byte, magnitude), 24);
    const __m256i bits = _mm256_or_si256(_mm256_slli_epi32(magnitude, 20), sign);
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    return _mm256_or_ps(value, _mm256_castsi256_ps(is_nan));
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace avx2

const Kernel kAvx2Fp8Block128 = {"avx2.fp8_block128",
                                 cpu::kAvx2Tier,
                                 format::WeightFormat::kFp8Block128,
                                 ActFormat::kF32,
                                 avx2::reject,
                                 nullptr,
                                 avx2::silu_mul,
                                 avx2::gemm<avx2::Fp8Block128>};

}  // namespace proa::gemm

#pragma GCC pop_options
