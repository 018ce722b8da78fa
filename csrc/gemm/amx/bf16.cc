#include "format/bf16.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "gemm/amx/tile.h"
#include "gemm/panel.h"
#include "gemm/registry.h"
#include "gemm/split_act.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace amx {
namespace {

#include "gemm/avx512/vec.h"
#include "gemm/split_cells-inl.h"

struct Bf16 {
  static constexpr auto kFormat = format::WeightFormat::kBf16;
  static constexpr int64_t kStepBytes = kSplitColumns * format::bf16::kColumnBytes;
  static constexpr bool kInPlace = true;
  static constexpr bool kOnVectors = true;
  static constexpr Scaling kScaling = Scaling::kInColumns;

  struct Pairs {
    __m512i first, second;
  };

  static constexpr int64_t offset(int64_t step) noexcept { return step * kStepBytes; }
  static Pairs load(const std::byte* panel, int64_t step, int64_t k, int64_t) noexcept {
    const std::byte* line = panel + offset(step) + k / 2 * kTileRowBytes;
    return {_mm512_loadu_si512(line), _mm512_loadu_si512(line + kTileRowBytes)};
  }
};
static_assert(format::bf16::kStep == kSplitColumns);

constexpr cpu::IsaMask kIsa = cpu::kAmxTier | cpu::kAmxBf16 | cpu::kAvx512Bf16;

}  // namespace
}  // namespace amx

const Kernel kAmxBf16 = amx::split_kernel<amx::Bf16, 1>("amx.bf16", amx::kIsa, format::any_shape);
const Kernel kAmxBf16x2 =
    amx::split_kernel<amx::Bf16, 2>("amx.bf16x2_act.bf16", amx::kIsa, format::any_shape);

}  // namespace proa::gemm

#pragma GCC pop_options
