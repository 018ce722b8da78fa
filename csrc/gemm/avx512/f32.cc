#include "format/f32.h"

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

struct F32 {
  static constexpr auto kFormat = format::WeightFormat::kF32;
  static constexpr int64_t kColumnBytes = format::f32::kColumnBytes;
  static constexpr Scaling kScaling = Scaling::kInColumns;

  static void load_line(const std::byte* line, Vec (&columns)[1]) {
    columns[0] = Vec::load(reinterpret_cast<const float*>(line));
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace avx512

const Kernel kAvx512F32 = {"avx512.f32",
                           cpu::kAvx512Tier,
                           format::WeightFormat::kF32,
                           ActFormat::kF32,
                           avx512::reject,
                           nullptr,
                           avx512::gemm<avx512::Lines<avx512::F32>>};

}  // namespace proa::gemm

#pragma GCC pop_options
