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
  static constexpr int64_t kColumnBytes = format::fp8_block128::kColumnBytes;
  static constexpr bool kScaled = true;

  static void unpack_line(__m512i line, std::byte* rows) {
    const Fp8Pairs pairs = widen_fp8(line);
    _mm512_store_si512(rows, pairs.first);
    _mm512_store_si512(rows + kTileRowBytes, pairs.second);
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
