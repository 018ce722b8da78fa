#include "format/f16.h"

#include <immintrin.h>

#include <array>
#include <cstring>
#include <utility>

#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace proa::gemm {
namespace avx2 {
namespace {

// 6 accumulators of two registers, two weights and a broadcast of the 16 registers.
constexpr int kPanels = 1;
constexpr int kTokens = 6;
constexpr int kStreams = 4;

#include "gemm/avx2/vec.h"
#include "gemm/f32_act-inl.h"

struct F16 {
  static constexpr auto kFormat = format::WeightFormat::kF16;
  static constexpr int64_t kColumnBytes = format::f16::kColumnBytes;
  static constexpr Scaling kScaling = Scaling::kInColumns;

  static void load_line(const std::byte* line, Vec (&columns)[2]) {
    columns[0] = load(line);
    columns[1] = load(line + kColumnBytes);
  }
  static Vec load(const std::byte* column) { return {load8(column), load8(column + 16)}; }
  static __m256 load8(const std::byte* column) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(column));
    return _mm256_cvtph_ps(bits);
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace avx2

const Kernel kAvx2F16 = {"avx2.f16",   cpu::kAvx2Tier, format::WeightFormat::kF16,        ActFormat::kF32,
                         avx2::reject, nullptr,        avx2::gemm<avx2::Lines<avx2::F16>>};

}  // namespace proa::gemm

#pragma GCC pop_options
