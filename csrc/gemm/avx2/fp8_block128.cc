#include "format/fp8_block128.h"

#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

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
#include "gemm/exp-inl.h"
#include "gemm/f32_act-inl.h"
#include "gemm/silu-inl.h"

struct Fp8Block128 {
  static constexpr auto kFormat = format::WeightFormat::kFp8Block128;
  static constexpr int64_t kColumnBytes = format::fp8_block128::kColumnBytes;
  static constexpr bool kScaled = true;

  // The byte moved up 7 bits, its sign 8, is the fp16 of 2^-8 times the value, subnormals included; both
  // steps to f32 are exact. The one NaN pattern would become 480: all its exponent bits are set instead.
  static void load_line(const std::byte* line, Vec (&columns)[4]) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) columns[u] = load(line + u * kColumnBytes);
  }
  static Vec load(const std::byte* column) {
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
