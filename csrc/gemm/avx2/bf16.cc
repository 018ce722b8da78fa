#include "format/bf16.h"

#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace proa::gemm {
namespace avx2 {
namespace {

// 6 accumulators of two registers, two weights and a broadcast of the 16 registers.
constexpr int kPanels = 1;
constexpr int kTokens = 6;
constexpr int kStreams = 4;

#include "gemm/avx2/vec.h"
#include "gemm/f32_act-inl.h"

struct Bf16 {
  static constexpr auto kFormat = format::WeightFormat::kBf16;
  static constexpr int64_t kColumnBytes = format::bf16::kColumnBytes;
  static constexpr Scaling kScaling = Scaling::kInColumns;

  static void load_line(const std::byte* line, Vec (&columns)[2]) {
    const auto* half = reinterpret_cast<const __m256i*>(line);
    const __m256i low = _mm256_loadu_si256(half), high = _mm256_loadu_si256(half + 1);
    columns[0] = {first(low), first(high)};
    columns[1] = {second(low), second(high)};
  }
  static __m256 first(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 second(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)));
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace avx2

const Kernel kAvx2Bf16 = {"avx2.bf16",  cpu::kAvx2Tier, format::WeightFormat::kBf16,        ActFormat::kF32,
                          avx2::reject, nullptr,        avx2::gemm<avx2::Lines<avx2::Bf16>>};

}  // namespace proa::gemm

#pragma GCC pop_options
