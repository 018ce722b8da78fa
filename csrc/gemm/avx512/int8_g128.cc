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
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace avx512 {
namespace {

#include "gemm/avx512/vec.h"

using format::int8_g128::kQuadBytes;

// Two dot products and a total each, of 32 registers.
constexpr int kTokens = 8;
constexpr int64_t kPrefetchBytes = 4096;

// 64 columns to both planes; returns the sum of their values. The columns past `count` are written as 0.
inline __m512i quantize_step(const float* x, int64_t count, __m512 divisor, float limit, __mmask16 nonzero,
                             int8_t* planes) noexcept {
  const __m512 low = _mm512_set1_ps(-limit), high = _mm512_set1_ps(limit);
  __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __mmask16 mask = 16 * i < count ? nonzero : 0;
    const __m512 ratio = _mm512_maskz_div_ps(mask, _mm512_maskz_loadu_ps(mask, x + 16 * i), divisor);
    const __m512i value = _mm512_cvtps_epi32(_mm512_min_ps(high, _mm512_max_ps(ratio, low)));
    const __m512i top = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(planes + 16 * i), _mm512_cvtepi32_epi8(top));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(planes + kInt16Step + 16 * i), _mm512_cvtepi32_epi8(value));
    sum = _mm512_add_epi32(sum, value);
  }
  return sum;
}

void quantize_group(const float* x, int64_t k, int64_t columns, float fine_above,
                    const Int16RowWriter& dst) noexcept {
  // As integers, so that a NaN wins over every number.
  __m512i magnitude = _mm512_setzero_si512();
  for (int64_t c = 0; c < columns; c += 16)
    magnitude = _mm512_max_epu32(magnitude,
                                 _mm512_and_si512(_mm512_loadu_si512(x + c), _mm512_set1_epi32(0x7fffffff)));
  const auto absmax = std::bit_cast<float>(_mm512_reduce_max_epu32(magnitude));
  const bool fine = absmax > fine_above;
  const float limit = fine ? kInt16Fine : kInt16Coarse, d = absmax / limit;
  const __mmask16 nonzero = d == 0.0f ? 0 : 0xffff;
  __m512i sum = _mm512_setzero_si512();
  for (int64_t c = 0; c < columns; c += kInt16Step)
    sum = _mm512_add_epi32(sum, quantize_step(x + c, columns - c, _mm512_set1_ps(d), limit, nonzero,
                                              dst.planes + int16_position(k + c)));
  dst.fine[k / kInt16Group] = fine;
  dst.scale[k / kInt16Group] = d;
  dst.offset[k / kInt16Group] = -format::int8_g128::kOffset * _mm512_reduce_add_epi32(sum);
}

void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, float fine_above,
              std::byte* row) noexcept {
  const Int16RowWriter dst(row, in_features);
  for (int64_t k = first; k < first + count; k += kInt16Group)
    quantize_group(x + k - first, k, first + count - k < kInt16Group ? first + count - k : kInt16Group,
                   fine_above, dst);
}

inline __m512i broadcast_quad(const int8_t* q) noexcept {
  int32_t quad;
  std::memcpy(&quad, q, 4);
  return _mm512_set1_epi32(quad);
}

// The dot products of `steps` times 64 columns with M tokens, which have high planes if kFine. For few tokens
// several sums each, as one would wait for itself: integers may be added in any order.
template <int M, bool kFine>
inline void dot_group(const std::byte* codes, int64_t steps, const int8_t* const (&x)[kTokens],
                      const int32_t (&offset)[kTokens], __m512i (&dot)[M]) noexcept {
  constexpr int kChains = M == 1 ? 4 : M <= 3 ? 2 : 1;
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));  // q + 128 as u8
  __m512i high[M][kChains], low[M][kChains];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      high[m][c] = _mm512_setzero_si512();
      low[m][c] = c == 0 ? _mm512_set1_epi32(offset[m]) : _mm512_setzero_si512();
    }
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j, codes += kQuadBytes) {
      _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes), _MM_HINT_T0);
      const __m512i u = _mm512_xor_si512(_mm512_loadu_si512(codes), flip);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const int8_t* planes = x[m] + s * kInt16StepBytes + 4 * j;
        if constexpr (kFine)
          high[m][j % kChains] = _mm512_dpbusd_epi32(high[m][j % kChains], u, broadcast_quad(planes));
        low[m][j % kChains] =
            _mm512_dpbusd_epi32(low[m][j % kChains], u, broadcast_quad(planes + kInt16Step));
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int c = 1; c < kChains; ++c) {
      high[m][0] = _mm512_add_epi32(high[m][0], high[m][c]);
      low[m][0] = _mm512_add_epi32(low[m][0], low[m][c]);
    }
    dot[m] = kFine ? _mm512_add_epi32(_mm512_slli_epi32(high[m][0], 8), low[m][0]) : low[m][0];
  }
}

template <int M>
void multiply_panel(const std::byte* panel, int64_t in_features, const Int16Row* x, float* out,
                    int64_t out_stride, int lanes) noexcept {
  const std::byte* scales = panel + format::int8_g128::scales_offset(in_features);
  const int64_t steps = int16_steps(in_features);
  Vec total[M];
  const int8_t* planes[kTokens];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    total[m] = Vec::zero();
    planes[m] = x[m].planes;
  }
  for (int64_t g = 0; g < int16_groups(in_features); ++g) {
    int32_t offset[kTokens];
    bool fine = false;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      offset[m] = x[m].offset[g];
      fine |= x[m].fine[g] != 0;
    }
    __m512i dot[M];
    const int64_t group_steps = steps - 2 * g < 2 ? 1 : 2;
    if (fine)
      dot_group<M, true>(panel, group_steps, planes, offset, dot);
    else
      dot_group<M, false>(panel, group_steps, planes, offset, dot);
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales) + g);
    const Vec scale{_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      total[m] = Vec::fma({_mm512_cvtepi32_ps(dot[m])}, Vec::mul(scale, Vec::set1(x[m].scale[g])), total[m]);
      planes[m] += 2 * kInt16StepBytes;
    }
    panel += 2 * format::int8_g128::kStepBytes;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) total[m].store_first(out + m * out_stride, lanes);
}

#include "gemm/int16_act-inl.h"

}  // namespace
}  // namespace avx512

const Kernel kAvx512Int8G128 = {"avx512.int8_g128",
                                cpu::kAvx512Tier | cpu::kAvx512Bw | cpu::kAvx512Vnni,
                                format::WeightFormat::kInt8G128,
                                ActFormat::kInt16G128,
                                format::int8_g128::reject,
                                avx512::quantize,
                                avx512::gemm};

}  // namespace proa::gemm

#pragma GCC pop_options
