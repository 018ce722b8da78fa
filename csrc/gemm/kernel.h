// The table of kernels: one cell = one ISA x one weight format, plain data, listed best first in registry.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "format/weight_format.h"

namespace proa::gemm {

// What a cell reads as activations: f32 rows as they are, or rows written by its `quantize`
// (quantized_act.h, split_act.h; act_format.h has their sizes).
enum class ActFormat : uint8_t { kF32, kInt8G32, kInt8G32Halves, kInt16G128, kBf16, kBf16x2 };

// Row m of the activations is data + stride_bytes * (index == nullptr ? m : index[m]). Tiled: every
// kBlockRows rows, the last ones aside, are one block that the cell's `pack` wrote, at the place of the
// first.
struct ActRows {
  static constexpr int64_t kBlockRows = 16;

  const std::byte* data = nullptr;
  int64_t stride_bytes = 0;
  const int32_t* index = nullptr;
  bool tiled = false;

  const std::byte* row(int64_t m) const noexcept {
    return data + stride_bytes * (index == nullptr ? m : index[m]);
  }
};

// out[m * out_stride + (r - 16 * panel_begin)] = sum over k of W[r][k] * x[m][k], for the rows r of panels
// [panel_begin, panel_end) and m < num_tokens; rows past out_features are not written.
struct GemmArgs {
  const std::byte* weight = nullptr;  // format::pack_panels
  format::Shape shape;
  int64_t panel_begin = 0;
  int64_t panel_end = 0;
  ActRows x;
  int64_t num_tokens = 0;
  float* out = nullptr;
  int64_t out_stride = 0;  // in floats
};

// The bits of a result depend on neither num_tokens nor the panel range. All cells of one weight format give
// the same bits, those that multiply bf16 tiles aside: each output has one accumulator, fed in the order of k
// by fused multiply-adds (docs/decisions/0001; the others: 0002).
struct Kernel {
  const char* name;  // "avx512.int4_g32"
  cpu::IsaMask required_isa;
  format::WeightFormat weight;
  ActFormat act;
  const char* (*reject)(const format::Shape& shape) noexcept;  // nullptr: can run, else the reason
  // Writes columns [first, first + count) of `row` from the floats at x; both multiples of 32, but the end of
  // the row may be any that the shape allows. Int8 groups whose absmax is above `fine_above` get two planes
  // (act_budget.h). nullptr when act is kF32.
  void (*quantize)(const float* x, int64_t first, int64_t count, int64_t in_features, float fine_above,
                   std::byte* row) noexcept;
  void (*gemm)(const GemmArgs& args) noexcept;
  // Rearranges `count` <= kBlockRows rows that `quantize` wrote so that tiles of them are read one after the
  // other; a block takes no more than kBlockRows rows do. nullptr: the cell reads rows only.
  void (*pack)(const std::byte* const* rows, int64_t count, int64_t in_features,
               std::byte* block) noexcept = nullptr;
};

// Every cell of this binary, best first within a format.
std::span<const Kernel* const> all_kernels() noexcept;

struct Candidate {
  const Kernel* kernel;
  bool chosen;
  std::string reason;  // why it was chosen or not
};

// What cells may round activations to, where a format has others that can run. kTrunk (attention, head): not
// to one bf16 term, so that float weights meet 16 bits or more. kInt8: to anything, the fastest cells. kBf16:
// not to int8.
enum class Activations : uint8_t { kTrunk, kInt8, kBf16 };

constexpr bool is_int8(ActFormat act) noexcept {
  return act == ActFormat::kInt8G32 || act == ActFormat::kInt8G32Halves;
}
constexpr bool is_bf16_tiles(ActFormat act) noexcept {
  return act == ActFormat::kBf16 || act == ActFormat::kBf16x2;
}

// All cells of `format` with the verdict for `shape` under the instructions `isa`. At most one is chosen.
std::vector<Candidate> explain_selection(format::WeightFormat format, const format::Shape& shape,
                                         cpu::IsaMask isa, Activations activations = Activations::kInt8);

// The first cell that can run, or nullptr (then explain_selection says why).
const Kernel* select_kernel(format::WeightFormat format, const format::Shape& shape, cpu::IsaMask isa,
                            Activations activations = Activations::kInt8) noexcept;

}  // namespace proa::gemm
