// What the int8 cells with 256-bit registers share. Include inside an ISA's target region and namespace,
// after Vec and `template <int M, bool kFine> dot_group`: for 8 rows each (dot[m][0], dot[m][1]) the exact
// dot products of `steps` times 64 columns with M tokens, which have high planes if kFine.

constexpr int64_t kGroupBytes = 2 * format::int8_g128::kStepBytes;

// The largest magnitude, as integers, so that a NaN wins over every number.
float abs_max(const float* x, int64_t n) noexcept {
  const __m256i sign_off = _mm256_set1_epi32(0x7fffffff);
  __m256i all = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i += 8)
    all = _mm256_max_epu32(all, _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + i)), sign_off));
  __m128i half = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epu32(half, _mm_shuffle_epi32(half, 0xb1));
  return std::bit_cast<float>(_mm_cvtsi128_si32(half));
}

// The low 8 bits of 16 values in -128 .. 127, to bytes.
inline void store_bytes(__m256i a, __m256i b, int8_t* dst) noexcept {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(dst),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// 16 columns to both planes; returns the sums of their values.
inline __m256i quantize_16(const float* x, float d, float limit, int8_t* planes) noexcept {
  const __m256 low = _mm256_set1_ps(-limit), high = _mm256_set1_ps(limit);
  __m256i value[2], top[2], rest[2];
  for (int i = 0; i < 2; ++i) {
    const __m256 ratio = _mm256_div_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(d));
    value[i] = _mm256_cvtps_epi32(_mm256_min_ps(high, _mm256_max_ps(ratio, low)));
    top[i] = _mm256_srai_epi32(_mm256_add_epi32(value[i], _mm256_set1_epi32(128)), 8);
    rest[i] = _mm256_sub_epi32(value[i], _mm256_slli_epi32(top[i], 8));
  }
  store_bytes(top[0], top[1], planes);
  store_bytes(rest[0], rest[1], planes + kInt16Step);
  return _mm256_add_epi32(value[0], value[1]);
}

void quantize_group(const float* x, int64_t k, int64_t columns, float fine_above,
                    const Int16RowWriter& dst) noexcept {
  const float absmax = abs_max(x, columns);
  const bool fine = absmax > fine_above;
  const float limit = fine ? kInt16Fine : kInt16Coarse, d = absmax / limit;
  dst.fine[k / kInt16Group] = fine;
  dst.scale[k / kInt16Group] = d;
  dst.offset[k / kInt16Group] = 0;
  std::memset(dst.planes + int16_position(k), 0, static_cast<size_t>(int16_steps(columns) * kInt16StepBytes));
  if (d == 0.0f) return;
  __m256i sums = _mm256_setzero_si256();
  for (int64_t c = 0; c < columns; c += 16)
    sums = _mm256_add_epi32(sums, quantize_16(x + c, d, limit, dst.planes + int16_position(k + c)));
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  dst.offset[k / kInt16Group] = -format::int8_g128::kOffset * _mm_cvtsi128_si32(half);
}

void quantize(const float* x, int64_t first, int64_t count, int64_t in_features, float fine_above,
              std::byte* row) noexcept {
  const Int16RowWriter dst(row, in_features);
  for (int64_t k = first; k < first + count; k += kInt16Group)
    quantize_group(x + k - first, k, first + count - k < kInt16Group ? first + count - k : kInt16Group,
                   fine_above, dst);
}

template <int M>
void multiply_panel(const std::byte* panel, int64_t in_features, const Int16Row* x, float* out,
                    int64_t out_stride, int lanes) noexcept {
  const auto* scales =
      reinterpret_cast<const __m128i*>(panel + format::int8_g128::scales_offset(in_features));
  const int64_t steps = int16_steps(in_features);
  __m256 total[M][2];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) total[m][0] = total[m][1] = _mm256_setzero_ps();
  for (int64_t g = 0; g < int16_groups(in_features); ++g, panel += kGroupBytes) {
    const int8_t* planes[M];
    int32_t offset[M];
    bool fine = false;
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      planes[m] = x[m].planes + g * 2 * kInt16StepBytes;
      offset[m] = x[m].offset[g];
      fine |= x[m].fine[g] != 0;
    }
    __m256i dot[M][2];
    const int64_t group_steps = steps - 2 * g < 2 ? 1 : 2;
    if (fine)
      dot_group<M, true>(panel, group_steps, planes, offset, dot);
    else
      dot_group<M, false>(panel, group_steps, planes, offset, dot);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i bits =
          _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(scales + 2 * g + half)), 16);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) {
        const __m256 scale = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(x[m].scale[g]));
        total[m][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[m][half]), scale, total[m][half]);
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) Vec{total[m][0], total[m][1]}.store_first(out + m * out_stride, lanes);
}

#include "gemm/int16_act-inl.h"
