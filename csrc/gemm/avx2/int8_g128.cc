#include "format/int8_g128.h"

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "gemm/int16_act.h"
#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace proa::gemm {
namespace avx2 {
namespace {

#include "gemm/avx2/vec.h"

using format::int8_g128::kQuadBytes;

constexpr int kTokens = 4;
constexpr int64_t kPrefetchBytes = 4096;

inline __m256i widen(const int8_t* values) noexcept {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
}

// 16 values of both planes as int16.
inline __m256i join_planes(const int8_t* planes) noexcept {
  return _mm256_add_epi16(_mm256_slli_epi16(widen(planes), 8), widen(planes + kInt16Step));
}

// int16 products: u8 x int8 pairs would saturate int16 sums.
template <int M, bool>
inline void dot_group(const std::byte* codes, int64_t steps, const int8_t* const (&planes)[M],
                      const int32_t (&)[M], __m256i (&dot)[M][2]) noexcept {
  alignas(32) int16_t x[M][kInt16Group];
  for (int m = 0; m < M; ++m)
    for (int64_t k = 0; k < steps * kInt16Step; k += 16)
      _mm256_store_si256(reinterpret_cast<__m256i*>(x[m] + k), join_planes(planes[m] + int16_position(k)));
  for (int half = 0; half < 2; ++half) {
    __m256i sum[M][2];  // of rows 0 .. 3 and 4 .. 7: of each row the first and the second pairs of its quads
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm256_setzero_si256();
    for (int64_t j = 0; j < steps * (kInt16Step / 4); ++j) {
      const auto* src = reinterpret_cast<const __m128i*>(codes + j * kQuadBytes + 32 * half);
      _mm_prefetch(reinterpret_cast<const char*>(src) + kPrefetchBytes, _MM_HINT_T0);
      const __m256i first = _mm256_cvtepi8_epi16(_mm_loadu_si128(src));
      const __m256i second = _mm256_cvtepi8_epi16(_mm_loadu_si128(src + 1));
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        int64_t quad;
        std::memcpy(&quad, x[m] + 4 * j, 8);
        const __m256i act = _mm256_set1_epi64x(quad);
        sum[m][0] = _mm256_add_epi32(sum[m][0], _mm256_madd_epi16(first, act));
        sum[m][1] = _mm256_add_epi32(sum[m][1], _mm256_madd_epi16(second, act));
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
      dot[m][half] = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[m][0], sum[m][1]), 0xd8);
  }
}

#include "gemm/avx2/int8_half-inl.h"

}  // namespace
}  // namespace avx2

const Kernel kAvx2Int8G128 = {"avx2.int8_g128",
                              cpu::kAvx2Tier,
                              format::WeightFormat::kInt8G128,
                              ActFormat::kInt16G128,
                              format::int8_g128::reject,
                              avx2::quantize,
                              avx2::gemm};

}  // namespace proa::gemm

#pragma GCC pop_options
