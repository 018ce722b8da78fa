#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "format/int8_g128.h"
#include "gemm/int16_act.h"
#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")

namespace proa::gemm {
namespace avxvnni {
namespace {

#include "gemm/avx2/vec.h"

using format::int8_g128::kQuadBytes;

constexpr int kTokens = 4;
constexpr int64_t kPrefetchBytes = 4096;

inline __m256i broadcast_quad(const int8_t* q) noexcept {
  int32_t quad;
  std::memcpy(&quad, q, 4);
  return _mm256_set1_epi32(quad);
}

template <int M, bool kFine>
inline void dot_group(const std::byte* codes, int64_t steps, const int8_t* const (&planes)[M],
                      const int32_t (&offset)[M], __m256i (&dot)[M][2]) noexcept {
  const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));  // q + 128 as u8
  for (int half = 0; half < 2; ++half) {
    __m256i high[M], low[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      high[m] = _mm256_setzero_si256();
      low[m] = _mm256_set1_epi32(offset[m]);
    }
    for (int64_t j = 0; j < steps * (kInt16Step / 4); ++j) {
      const auto* src = reinterpret_cast<const __m256i*>(codes + j * kQuadBytes + 32 * half);
      _mm_prefetch(reinterpret_cast<const char*>(src) + kPrefetchBytes, _MM_HINT_T0);
      const __m256i u = _mm256_xor_si256(_mm256_loadu_si256(src), flip);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const int8_t* x = planes[m] + int16_position(4 * j);
        if constexpr (kFine) high[m] = _mm256_dpbusd_avx_epi32(high[m], u, broadcast_quad(x));
        low[m] = _mm256_dpbusd_avx_epi32(low[m], u, broadcast_quad(x + kInt16Step));
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
      dot[m][half] = kFine ? _mm256_add_epi32(_mm256_slli_epi32(high[m], 8), low[m]) : low[m];
  }
}

#include "gemm/avx2/int8_half-inl.h"

}  // namespace
}  // namespace avxvnni

const Kernel kAvxVnniInt8G128 = {
    "avxvnni.int8_g128",   cpu::kAvx2Tier | cpu::kAvxVnni, format::WeightFormat::kInt8G128,
    ActFormat::kInt16G128, format::int8_g128::reject,      avxvnni::quantize,
    avxvnni::gemm};

}  // namespace proa::gemm

#pragma GCC pop_options
