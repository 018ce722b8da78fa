// What the int4 cells with 256-bit registers share. Include inside an ISA's target region and namespace,
// after Vec and `dot_quads`: for each of 8 rows the sum of 8 u8 quads times 8 int8 quads, plus `offset`.

using format::kInt4Group;
using format::int4_g32::kBlockBytes;
using format::int4_g32::kWordBytes;

constexpr int kTokens = 4;
constexpr int64_t kPrefetchBytes = 4096;

const char* reject(const format::Shape& shape) noexcept {
  return shape.in_features % kInt4Group == 0 ? nullptr : "in_features is not a multiple of the group of 32";
}

// The largest magnitude of 32 floats, as integers, so that a NaN wins over every number.
float abs_max(const float* x) noexcept {
  const __m256i sign_off = _mm256_set1_epi32(0x7fffffff);
  __m256i all = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i)
    all = _mm256_max_epu32(all, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + 8 * i)), sign_off));
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  return std::bit_cast<float>(_mm_cvtsi128_si32(half));
}

void quantize_group(const float* x, int8_t* q, float* scale, int32_t* offset) noexcept {
  const float d = abs_max(x) / 127.0f;
  *scale = d;
  *offset = 0;
  if (d == 0.0f) {
    std::memset(q, 0, kInt4Group);
    return;
  }
  const __m256 low = _mm256_set1_ps(-127.0f), high = _mm256_set1_ps(127.0f);
  __m256i value[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 ratio = _mm256_div_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(d));
    value[i] = _mm256_cvtps_epi32(_mm256_min_ps(high, _mm256_max_ps(ratio, low)));
  }
  const __m256i sums =
      _mm256_add_epi32(_mm256_add_epi32(value[0], value[1]), _mm256_add_epi32(value[2], value[3]));
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  *offset = -format::int4_g32::kOffset * _mm_cvtsi128_si32(half);
  // The packs work within 128-bit halves; the permute puts the dwords back in order.
  const __m256i words =
      _mm256_packs_epi16(_mm256_packs_epi32(value[0], value[1]), _mm256_packs_epi32(value[2], value[3]));
  const __m256i bytes = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  // Of each 8 bytes: the even ones, then the odd ones.
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_shuffle_epi8(bytes, order));
}

// 8 rows of a block (half 0 or 1) as 8 u8 quads per row and their scales.
struct HalfBlock {
  __m256i quads[8];
  __m256 scales;
};

inline HalfBlock load_half(const std::byte* block, int half) noexcept {
  HalfBlock result;
  const __m256i low_nibble = _mm256_set1_epi8(0x0f);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const auto* src = reinterpret_cast<const __m256i*>(block + kWordBytes * j + 32 * half);
    const __m256i word = _mm256_loadu_si256(src);
    result.quads[2 * j] = _mm256_and_si256(word, low_nibble);
    result.quads[2 * j + 1] = _mm256_and_si256(_mm256_srli_epi16(word, 4), low_nibble);
  }
  const auto* scales = reinterpret_cast<const __m128i*>(block + format::int4_g32::kNibbleBytes + 16 * half);
  result.scales = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(scales)), 16));
  return result;
}

template <int M>
void multiply_panel(const std::byte* panel, int64_t groups, const QuantizedRow* x, float* out,
                    int64_t out_stride, int lanes) noexcept {
  __m256 total[M][2];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) total[m][0] = total[m][1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, panel += kBlockBytes) {
    // Panels follow each other, so past the end of this one is the start of the next.
#pragma GCC unroll 5
    for (int line = 0; line < 5; ++line)
      _mm_prefetch(reinterpret_cast<const char*>(panel + kPrefetchBytes + 64 * line), _MM_HINT_T0);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const HalfBlock block = load_half(panel, half);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256i dot = dot_quads(block.quads, x[m].q + g * kInt4Group, x[m].offset[g]);
        const __m256 scale = _mm256_mul_ps(block.scales, _mm256_set1_ps(x[m].scale[g]));
        total[m][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, total[m][half]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) Vec{total[m][0], total[m][1]}.store_first(out + m * out_stride, lanes);
}

#include "gemm/int4_act-inl.h"
