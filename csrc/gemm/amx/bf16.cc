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
#include "gemm/split_act-inl.h"

struct Bf16 {
  static constexpr auto kFormat = format::WeightFormat::kBf16;
  static constexpr int64_t kStepBytes = kSplitColumns * format::bf16::kColumnBytes;
  static constexpr bool kInPlace = true;
  static constexpr Scaling kScaling = Scaling::kInColumns;

  static constexpr int64_t offset(int64_t step) noexcept { return step * kStepBytes; }
};
static_assert(format::bf16::kStep == kSplitColumns);

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace amx

const Kernel kAmxBf16 = {"amx.bf16",
                         cpu::kAmxTier | cpu::kAmxBf16 | cpu::kAvx512Bf16,
                         format::WeightFormat::kBf16,
                         ActFormat::kBf16Terms,
                         amx::reject,
                         amx::split,
                         amx::gemm<amx::Bf16>};

}  // namespace proa::gemm

#pragma GCC pop_options
