#include "format/f16.h"

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

struct F16 {
  static constexpr auto kFormat = format::WeightFormat::kF16;
  static constexpr int64_t kColumnBytes = format::f16::kColumnBytes;
  static constexpr Scaling kScaling = Scaling::kInColumns;

  static void load_line(const std::byte* line, Vec (&columns)[2]) {
    columns[0] = load(line);
    columns[1] = load(line + kColumnBytes);
  }
  static Vec load(const std::byte* column) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(column));
    return {_mm512_cvtph_ps(bits)};
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace avx512

const Kernel kAvx512F16 = {"avx512.f16",
                           cpu::kAvx512Tier,
                           format::WeightFormat::kF16,
                           ActFormat::kF32,
                           avx512::reject,
                           nullptr,
                           avx512::gemm<avx512::Lines<avx512::F16>>};

}  // namespace proa::gemm

#pragma GCC pop_options
