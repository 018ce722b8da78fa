#include "format/bf16.h"

#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace avx512 {
namespace {

// 2 x 12 accumulators, 2 weights and a broadcast of the 32 registers.
constexpr int kPanels = 2;
constexpr int kTokens = 12;
constexpr int kStreams = 4;

#include "gemm/avx512/vec.h"
#include "gemm/f32_act-inl.h"

struct Bf16 {
  static constexpr auto kFormat = format::WeightFormat::kBf16;
  static constexpr int64_t kColumnBytes = format::bf16::kColumnBytes;
  static constexpr Scaling kScaling = Scaling::kInColumns;

  static void load_line(const std::byte* line, Vec (&columns)[2]) {
    const __m512i pairs = _mm512_loadu_si512(line);
    columns[0] = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
    columns[1] = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)))};
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace avx512

const Kernel kAvx512Bf16 = {"avx512.bf16",
                            cpu::kAvx512Tier,
                            format::WeightFormat::kBf16,
                            ActFormat::kF32,
                            avx512::reject,
                            nullptr,
                            avx512::gemm<avx512::Lines<avx512::Bf16>>};

}  // namespace proa::gemm

#pragma GCC pop_options
