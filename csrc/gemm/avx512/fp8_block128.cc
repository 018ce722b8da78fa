#include "format/fp8_block128.h"

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace avx512 {
namespace {

// 2 x 12 accumulators, 2 weights and a broadcast of the 32 registers.
constexpr int kPanels = 2;
constexpr int kTokens = 12;
constexpr int kStreams = 4;

#include "gemm/avx512/fp8_pairs-inl.h"
#include "gemm/avx512/vec.h"
#include "gemm/exp-inl.h"
#include "gemm/f32_act-inl.h"
#include "gemm/silu-inl.h"

struct Fp8Block128 {
  static constexpr auto kFormat = format::WeightFormat::kFp8Block128;
  static constexpr int64_t kColumnBytes = format::fp8_block128::kColumnBytes;
  static constexpr bool kScaled = true;

  static void load_line(const std::byte* line, Vec (&columns)[4]) {
    const Fp8Pairs pairs = widen_fp8(_mm512_loadu_si512(line));
    split(pairs.first, columns[0], columns[1]);
    split(pairs.second, columns[2], columns[3]);
  }
  static void split(__m512i pairs, Vec& first, Vec& second) {
    first.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    second.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace avx512

const Kernel kAvx512Fp8Block128 = {"avx512.fp8_block128",
                                   cpu::kAvx512Tier | cpu::kAvx512Vbmi,
                                   format::WeightFormat::kFp8Block128,
                                   ActFormat::kF32,
                                   avx512::reject,
                                   nullptr,
                                   avx512::silu_mul,
                                   avx512::gemm<avx512::Fp8Block128>};

}  // namespace proa::gemm

#pragma GCC pop_options
