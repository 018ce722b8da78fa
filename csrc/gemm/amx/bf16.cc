#include "format/bf16.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "gemm/amx/avx512_parts.h"
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

// The two columns of a line, interleaved.
struct alignas(64) PairOrder {
  uint16_t word[32];
};

constexpr PairOrder make_pair_order() {
  PairOrder order{};
  for (uint16_t row = 0; row < 16; ++row) {
    order.word[2 * row] = row;
    order.word[2 * row + 1] = static_cast<uint16_t>(row + 16);
  }
  return order;
}

constexpr PairOrder kPairOrder = make_pair_order();

struct Bf16 {
  static constexpr auto kFormat = format::WeightFormat::kBf16;
  static constexpr int64_t kColumnBytes = format::bf16::kColumnBytes;
  static constexpr bool kScaled = false;

  static void unpack_line(__m512i line, std::byte* rows) {
    _mm512_store_si512(rows, _mm512_permutexvar_epi16(_mm512_load_si512(kPairOrder.word), line));
  }
};

const char* reject(const format::Shape&) noexcept { return nullptr; }

}  // namespace
}  // namespace amx

const Kernel kAmxBf16 = {"amx.bf16",
                         cpu::kAmxTier | cpu::kAmxBf16 | cpu::kAvx512Bf16,
                         format::WeightFormat::kBf16,
                         ActFormat::kBf16Terms,
                         amx::reject,
                         amx::split,
                         amx::silu_mul,
                         amx::gemm<amx::Bf16>};

}  // namespace proa::gemm

#pragma GCC pop_options
