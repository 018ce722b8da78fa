#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "format/fp8_block128.h"
#include "format/fp8_channel.h"
#include "format/mxfp8.h"
#include "gemm/amx/tile.h"
#include "gemm/panel.h"
#include "gemm/registry.h"
#include "gemm/split_act.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace amx {
namespace {

#include "gemm/avx512/fp8_pairs-inl.h"
#include "gemm/avx512/vec.h"
#include "gemm/split_cells-inl.h"

// The four columns from k on of a step, of which `columns` are there: the others are 0.
inline Fp8Pairs load_pairs(const std::byte* step, int64_t k, int64_t columns) noexcept {
  const int64_t bytes = std::clamp<int64_t>(columns - k, 0, 4) * kPanelRows;
  const __mmask64 mask = bytes == 64 ? ~uint64_t{0} : (uint64_t{1} << bytes) - 1;
  return widen_fp8(_mm512_maskz_loadu_epi8(mask, step + k * kPanelRows));
}

// Columns of 16 e4m3 bytes, and scales that are applied to sums.
template <format::WeightFormat format, Scaling scale>
struct Columns {
  static constexpr auto kFormat = format;
  static constexpr int64_t kStepBytes = kSplitColumns * kPanelRows;
  static constexpr bool kInPlace = false;
  static constexpr bool kOnVectors = true;
  static constexpr Scaling kScaling = scale;

  static constexpr int64_t offset(int64_t step) noexcept { return step * kStepBytes; }
  static const float* row_scales(const std::byte* panel, int64_t in_features) noexcept {
    return format::fp8_channel::row_scales(panel, in_features);  // kPerRow
  }
  static Fp8Pairs load(const std::byte* panel, int64_t step, int64_t k, int64_t columns) noexcept {
    return load_pairs(panel + offset(step), k, columns);
  }
};

// The e8m0 scale joins the weight: exact but for results below 2^-126, which tile products take as 0.
struct MxFp8 {
  static constexpr auto kFormat = format::WeightFormat::kMxFp8;
  static constexpr int64_t kStepBytes = kSplitColumns * kPanelRows;
  static constexpr bool kInPlace = false;
  static constexpr bool kOnVectors = false;  // a scale of 2^-127 would count as 0
  static constexpr Scaling kScaling = Scaling::kInColumns;
  static_assert(format::mxfp8::kGroup == kSplitColumns);

  static constexpr int64_t offset(int64_t step) noexcept {
    return format::mxfp8::column_offset(step * kSplitColumns);
  }
  static __m512 load_scales(const std::byte* src) noexcept {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
    const __m512i power = _mm512_mask_mov_epi32(
        _mm512_slli_epi32(bytes, 23), _mm512_testn_epi32_mask(bytes, bytes), _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(0xff));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(power, nan, _mm512_set1_epi32(0x7fc00000)));
  }
  static __m512i scaled(__m512i pairs, __m512 scale) noexcept {
    const __m512i upper = _mm512_set1_epi32(-0x10000);
    const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const __m512 second = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(first, scale)), 16);
    const __m512i high = _mm512_and_si512(_mm512_castps_si512(_mm512_mul_ps(second, scale)), upper);
    return _mm512_or_si512(low, high);
  }
  static Fp8Pairs load(const std::byte* panel, int64_t step, int64_t k, int64_t columns) noexcept {
    const __m512 scale = load_scales(panel + format::mxfp8::scales_offset(step * kSplitColumns));
    const Fp8Pairs pairs = load_pairs(panel + offset(step), k, columns);
    return {scaled(pairs.first, scale), scaled(pairs.second, scale)};
  }
};

using format::WeightFormat;

using Block128 = Columns<WeightFormat::kFp8Block128, Scaling::kPerBlock>;
using Channel = Columns<WeightFormat::kFp8Channel, Scaling::kPerRow>;

constexpr cpu::IsaMask kIsa = cpu::kAmxTier | cpu::kAmxBf16 | cpu::kAvx512Bf16 | cpu::kAvx512Vbmi;

}  // namespace
}  // namespace amx

const Kernel kAmxFp8Block128 =
    amx::split_kernel<amx::Block128, 1>("amx.fp8_block128", amx::kIsa, format::any_shape);
const Kernel kAmxFp8Block128x2 =
    amx::split_kernel<amx::Block128, 2>("amx.bf16x2_act.fp8_block128", amx::kIsa, format::any_shape);
const Kernel kAmxFp8Channel =
    amx::split_kernel<amx::Channel, 1>("amx.fp8_channel", amx::kIsa, format::any_shape);
const Kernel kAmxFp8Channelx2 =
    amx::split_kernel<amx::Channel, 2>("amx.bf16x2_act.fp8_channel", amx::kIsa, format::any_shape);
const Kernel kAmxMxFp8 = amx::split_kernel<amx::MxFp8, 1>("amx.mxfp8", amx::kIsa, format::mxfp8::reject);
const Kernel kAmxMxFp8x2 =
    amx::split_kernel<amx::MxFp8, 2>("amx.bf16x2_act.mxfp8", amx::kIsa, format::mxfp8::reject);

}  // namespace proa::gemm

#pragma GCC pop_options
