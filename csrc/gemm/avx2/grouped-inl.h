// What the cells of grouped formats with 256-bit registers share: 8 rows of a panel at a time. Include inside
// an ISA's target region and namespace, after Vec and beside the definition of `dot_quads`.

#include "gemm/avx2/grouped_codes-inl.h"

using format::kGroup;

constexpr int kTokenCounts[] = {1, 2, 3};
constexpr int kBlockTokens = 4;
constexpr int streams_of(int tokens) noexcept { return tokens <= 2 ? 2 : 1; }
constexpr int64_t kPrefetchBytes = 4096;

// `dot` plus, for each of 8 rows, the u8 quads first .. first + count - 1 times the int8 quads at q.
template <class F>
inline __m256i dot_quads(__m256i dot, const __m256i (&quads)[8], int first, int count,
                         const int8_t* q) noexcept;

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

int32_t sum_of(__m256i values) noexcept {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return _mm_cvtsi128_si32(half);
}

// The packs work within 128-bit halves; the permute puts the dwords back in order. Of each 8 bytes: the even
// ones, then the odd ones.
inline void store_plane(const __m256i (&value)[4], int8_t* dst) noexcept {
  const __m256i words =
      _mm256_packs_epi16(_mm256_packs_epi32(value[0], value[1]), _mm256_packs_epi32(value[2], value[3]));
  const __m256i bytes = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm256_shuffle_epi8(bytes, order));
}

bool quantize_group(const float* x, float fine_above, int8_t* q, int8_t* high, float* scale,
                    int32_t (&halves)[2]) noexcept {
  const float absmax = abs_max(x);
  const bool fine = absmax > fine_above;
  const float limit = fine ? kTwoPlanes : kOnePlane, d = absmax / limit;
  *scale = d;
  halves[0] = halves[1] = 0;
  if (d == 0.0f) {
    std::memset(q, 0, kGroup);
    if (fine) std::memset(high, 0, kGroup);
    return fine;
  }
  const __m256 least = _mm256_set1_ps(-limit), most = _mm256_set1_ps(limit);
  __m256i value[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 ratio = _mm256_div_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(d));
    value[i] = _mm256_cvtps_epi32(_mm256_min_ps(most, _mm256_max_ps(ratio, least)));
  }
  halves[0] = sum_of(_mm256_add_epi32(value[0], value[1]));
  halves[1] = sum_of(_mm256_add_epi32(value[2], value[3]));
  if (fine) {
    __m256i upper[4];
    for (int i = 0; i < 4; ++i) {
      upper[i] = _mm256_srai_epi32(_mm256_add_epi32(value[i], _mm256_set1_epi32(4)), kHighShift);
      value[i] = _mm256_sub_epi32(value[i], _mm256_slli_epi32(upper[i], kHighShift));
    }
    store_plane(upper, high);
  }
  store_plane(value, q);
  return fine;
}

inline void sum_halves(const float* x, float (&halves)[2]) noexcept {
  for (int h = 0; h < 2; ++h, x += 16) {
    const __m256 eight = _mm256_add_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    halves[h] = _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
  }
}

// Group `i` of a super-block, group x of the tokens: what its columns add to the totals of 8 rows.
template <class F, int M, class Tokens>
inline void multiply_group(const __m256i (&quads)[8], const SuperScales<F>& scales, int64_t i,
                           const typename Tokens::Group& x, __m256 (&total)[M]) noexcept {
  constexpr int kHalves = format::GroupedLayout<F>::kHalves, kQuads = 8 / kHalves;
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    const __m256 scale = scales.scale(i * kGroup + h * 16);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const __m256i start = F::kMinimum ? _mm256_setzero_si256() : _mm256_set1_epi32(x.offset(m, h));
      __m256i dot = dot_quads<F>(start, quads, kQuads * h, kQuads, x.q(m));
      if (x.fine(m)) {
        const __m256i high = dot_quads<F>(_mm256_setzero_si256(), quads, kQuads * h, kQuads, x.high(m));
        dot = _mm256_add_epi32(dot, _mm256_slli_epi32(high, kHighShift));
      }
      const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale(m)));
      total[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), factor, total[m]);
      if constexpr (F::kMinimum) {
        total[m] =
            _mm256_fmadd_ps(scales.minimum(i * kGroup + h * 16), _mm256_set1_ps(x.sum(m, h)), total[m]);
        total[m] = _mm256_fmadd_ps(scale, _mm256_set1_ps(x.rest(m, h)), total[m]);
      }
    }
  }
}

template <class F, int M, int P, class Tokens>
void multiply_panels(const Panels& panels, const Tokens& x, float* out, int64_t out_stride) noexcept {
  using Layout = format::GroupedLayout<F>;
  const int64_t all_groups = panels.in_features / kGroup;
  __m256 total[P][2][M];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * P * M; ++i) total[i / 2 / M][i / M % 2][i % M] = _mm256_setzero_ps();
  for (int64_t g = 0, at = 0; g < all_groups; g += Layout::kGroups) {
    const int64_t groups =
        Layout::kGroups == 1 || all_groups - g >= Layout::kGroups ? Layout::kGroups : all_groups - g;
    const std::byte* super = panels.first + at;
    const std::byte* ahead = super + panels.ahead(at, kPrefetchBytes / P, P);
    SuperScales<F> scales[P][2];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
      for (int half = 0; half < 2; ++half)
        scales[p][half] = SuperScales<F>(super + p * panels.stride, groups, half);
    for (int64_t i = 0; i < groups; ++i) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        prefetch_group<F>(ahead + p * panels.stride, i, groups);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          __m256i quads[8];
          load_quads<F>(super + p * panels.stride + i * Layout::kGroupBytes, half, quads);
          multiply_group<F, M, Tokens>(quads, scales[p][half], i, x.group(g + i), total[p][half]);
        }
      }
    }
    at += Layout::super_bytes(groups);
  }
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const std::byte* factors =
        panels.first + p * panels.stride + Layout::row_scale_offset(panels.in_features);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      Vec result{total[p][0][m], total[p][1][m]};
      if constexpr (F::kRowScale)
        result = Vec::mul(result, Vec::load(reinterpret_cast<const float*>(factors)));
      result.store_first(out + m * out_stride + p * format::kPanelRows, p == P - 1 ? panels.last_lanes : 16);
    }
  }
}

#include "gemm/grouped_act-inl.h"
