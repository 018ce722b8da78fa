#include "format/f32.h"

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
}  // namespace avx2

const Kernel kAvx2F32 = {"avx2.f32",   cpu::kAvx2Tier, format::WeightFormat::kF32,        ActFormat::kF32,
                         avx2::reject, nullptr,        avx2::gemm<avx2::Lines<avx2::F32>>};

}  // namespace proa::gemm

#pragma GCC pop_options
