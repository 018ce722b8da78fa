#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

#include "format/fp8_block128.h"
#include "format/fp8_channel.h"
#include "format/mxfp8.h"
#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace proa::gemm {
namespace avx2 {
namespace {

// 6 accumulators of two registers, two weights and a broadcast of the 16 registers.
constexpr int kPanels = 1;
constexpr int kTokens = 6;
constexpr int kStreams = 4;

#include "gemm/avx2/vec.h"
#include "gemm/f32_act-inl.h"

// The byte moved up 7 bits, its sign 8, is the fp16 of 2^-8 times the value, subnormals included; both steps
// to f32 are exact. The one NaN pattern would become 480: all its exponent bits are set instead.
inline Vec load_fp8_column(const std::byte* column) {
  const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(column)));
  const __m256i half =
      _mm256_and_si256(_mm256_slli_epi16(bytes, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  const __m256i nan = _mm256_set1_epi16(0x3f80);
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, nan), nan);
  const __m256i fixed = _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7f80)));
  const __m256 factor = _mm256_set1_ps(256.0f);
  return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(fixed)), factor),
          _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(fixed, 1)), factor)};
}

inline void load_fp8_line(const std::byte* line, Vec (&columns)[4]) {
#pragma GCC unroll 4
  for (int u = 0; u < 4; ++u) columns[u] = load_fp8_column(line + 16 * u);
}

#include "gemm/fp8_weights-inl.h"

constexpr Kernel fp8_kernel(const char* name, format::WeightFormat weight,
                            const char* (*reject_shape)(const format::Shape&) noexcept,
                            void (*gemm_fn)(const GemmArgs&) noexcept) {
  return {name, cpu::kAvx2Tier, weight, ActFormat::kF32, reject_shape, nullptr, gemm_fn};
}

}  // namespace
}  // namespace avx2

using format::WeightFormat;

const Kernel kAvx2Fp8Block128 =
    avx2::fp8_kernel("avx2.fp8_block128", WeightFormat::kFp8Block128, format::any_shape,
                     avx2::gemm<avx2::Lines<avx2::Fp8Block128>>);
const Kernel kAvx2Fp8Channel = avx2::fp8_kernel("avx2.fp8_channel", WeightFormat::kFp8Channel,
                                                format::any_shape, avx2::gemm<avx2::Lines<avx2::Fp8Channel>>);
const Kernel kAvx2MxFp8 =
    avx2::fp8_kernel("avx2.mxfp8", WeightFormat::kMxFp8, format::mxfp8::reject, avx2::gemm<avx2::MxFp8>);

}  // namespace proa::gemm

#pragma GCC pop_options
