#include "format/fp8_block128.h"

#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

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

#include "gemm/avx512/vec.h"
#include "gemm/exp-inl.h"
#include "gemm/f32_act-inl.h"
#include "gemm/silu-inl.h"

// Every e4m3 magnitude is a bf16 exactly.
struct alignas(64) Tables {
  uint8_t order[64];
  uint8_t low[128];
  uint8_t high[128];
};

constexpr Tables make_tables() {
  Tables tables{};
  for (int lane = 0; lane < 4; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int column = 0; column < 4; ++column)
        tables.order[16 * lane + 8 * (column / 2) + 2 * i + column % 2] =
            static_cast<uint8_t>(format::kPanelRows * column + 4 * lane + i);
  for (uint32_t byte = 0; byte < 128; ++byte) {
    const uint32_t bits = std::bit_cast<uint32_t>(base::fp8_e4m3_to_f32(static_cast<uint8_t>(byte)));
    tables.low[byte] = static_cast<uint8_t>(bits >> 16);
    tables.high[byte] = static_cast<uint8_t>(bits >> 24);
  }
  return tables;
}

constexpr Tables kTables = make_tables();

struct Fp8Block128 {
  static constexpr auto kFormat = format::WeightFormat::kFp8Block128;
  static constexpr int64_t kColumnBytes = format::fp8_block128::kColumnBytes;
  static constexpr bool kScaled = true;

  // Two table look-ups give the upper and lower byte of the bf16 with the magnitude of each of 64 bytes; the
  // sign joins the upper one. The bytes are first brought in an order in which unpacking them pairwise leaves
  // columns 0 | 1 of a row (then 2 | 3) in the halves of one dword.
  static void load_line(const std::byte* line, Vec (&columns)[4]) {
    const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(kTables.order), _mm512_loadu_si512(line));
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(kTables.low), bytes, _mm512_load_si512(kTables.low + 64));
    const __m512i magnitude = _mm512_permutex2var_epi8(_mm512_load_si512(kTables.high), bytes,
                                                       _mm512_load_si512(kTables.high + 64));
    // magnitude | (bytes & 0x80)
    const __m512i high =
        _mm512_ternarylogic_epi32(magnitude, bytes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    split(_mm512_unpacklo_epi8(low, high), columns[0], columns[1]);
    split(_mm512_unpackhi_epi8(low, high), columns[2], columns[3]);
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
