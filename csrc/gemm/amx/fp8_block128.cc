#include "format/fp8_block128.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "gemm/amx/avx512_parts.h"
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
#include "gemm/split_act-inl.h"

struct Fp8Block128 {
  static constexpr auto kFormat = format::WeightFormat::kFp8Block128;
  static constexpr int64_t kStepBytes = kSplitColumns * format::fp8_block128::kColumnBytes;
  static constexpr bool kInPlace = false;
  static constexpr bool kScaled = true;

  static void unpack(const std::byte* step, int64_t columns, std::byte* tile) {
    for (int64_t k = 0; k < kSplitColumns; k += 4, step += 64, tile += 2 * kTileRowBytes) {
      const __mmask64 mask = columns - k >= 4 ? ~uint64_t{0}
                             : columns <= k   ? 0
                                              : (uint64_t{1} << 16 * (columns - k)) - 1;
      const Fp8Pairs pairs = widen_fp8(_mm512_maskz_loadu_epi8(mask, step));
      _mm512_store_si512(tile, pairs.first);
      _mm512_store_si512(tile + kTileRowBytes, pairs.second);
    }
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace amx

const Kernel kAmxFp8Block128 = {"amx.fp8_block128",
                                cpu::kAmxTier | cpu::kAmxBf16 | cpu::kAvx512Bf16 | cpu::kAvx512Vbmi,
                                format::WeightFormat::kFp8Block128,
                                ActFormat::kBf16Terms,
                                amx::reject,
                                amx::split,
                                amx::silu_mul,
                                amx::gemm<amx::Fp8Block128>};

}  // namespace proa::gemm

#pragma GCC pop_options
