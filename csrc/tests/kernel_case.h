// One multiplication of random size for any cell, for the tests of the kernels.
#pragma once

#include <limits>
#include <string>

#include "gemm/act_budget.h"
#include "gemm/act_format.h"
#include "gemm/kernel.h"
#include "tests/check.h"
#include "tests/random_weight.h"

namespace proa::test {

inline bool runnable(const gemm::Kernel& kernel) {
  return (kernel.required_isa & ~cpu::isa_choice().in_use) == 0;
}

inline const gemm::Kernel& scalar_kernel(format::WeightFormat weight) {
  return *gemm::select_kernel(weight, {32, 256}, 0);
}

// The scalar cell that reads `act`, or nullptr.
inline const gemm::Kernel* scalar_kernel(format::WeightFormat weight, gemm::ActFormat act) {
  for (const gemm::Kernel* kernel : gemm::all_kernels())
    if (kernel->weight == weight && kernel->act == act && kernel->required_isa == 0) return kernel;
  return nullptr;
}

// Which groups of int8 activations get two planes: those of a row whose absmax is above kFineAbove (about
// half, when x is normal), or none or all of a row; kMixed: none, some, and all but zeros, for 16 rows each.
enum class Fine { kNone, kSome, kAll, kMixed };
inline constexpr float kFineAbove = 2.2f;

inline float fine_above(Fine fine, int64_t row) {
  if (fine == Fine::kMixed && row / 16 % 3 == 2) return 0.0f;
  if (fine == Fine::kMixed) fine = static_cast<Fine>(row / 16 % 3);
  return fine == Fine::kNone   ? std::numeric_limits<float>::infinity()
         : fine == Fine::kSome ? kFineAbove
                               : gemm::kAllFine;
}

inline Fine random_fine(Rng& rng) { return static_cast<Fine>(pick(rng, 0, 3)); }

// The rows `index` of x [num_rows, in] as `kernel` reads them.
struct Activations {
  std::vector<float> x;
  std::vector<std::byte> quantized;
  gemm::ActRows rows;

  Activations(const gemm::Kernel& kernel, std::vector<float> values, int64_t in, const int32_t* index,
              Fine fine)
      : x(std::move(values)) {
    rows = {reinterpret_cast<const std::byte*>(x.data()), 4 * in, index};
    if (kernel.quantize == nullptr) return;
    const int64_t row_bytes = gemm::act_row_bytes(kernel.act, in);
    const int64_t num_rows = static_cast<int64_t>(x.size()) / in;
    quantized.resize(static_cast<size_t>(num_rows * row_bytes));
    for (int64_t r = 0; r < num_rows; ++r)
      kernel.quantize(x.data() + r * in, 0, in, in, fine_above(fine, r), quantized.data() + r * row_bytes);
    rows = {quantized.data(), row_bytes, index};
  }
};

// The same rows in blocks, for a cell that has `pack`.
struct PackedActivations {
  std::vector<std::byte> blocks;
  gemm::ActRows rows;

  PackedActivations(const gemm::Kernel& kernel, const gemm::ActRows& from, int64_t num_rows, int64_t in)
      : blocks(static_cast<size_t>((num_rows + gemm::ActRows::kBlockRows) * from.stride_bytes) + 64,
               std::byte{0x7f}) {
    void* start = blocks.data();
    size_t space = blocks.size();
    auto* first = static_cast<std::byte*>(std::align(64, space - 64, start, space));
    for (int64_t m = 0; m < num_rows; m += gemm::ActRows::kBlockRows) {
      const int64_t count = std::min(gemm::ActRows::kBlockRows, num_rows - m);
      const std::byte* block_rows[gemm::ActRows::kBlockRows];
      for (int64_t i = 0; i < count; ++i) block_rows[i] = from.row(m + i);
      kernel.pack(block_rows, count, in, first + m * from.stride_bytes);
    }
    rows = {first, from.stride_bytes, nullptr, true};
  }
};

struct Case {
  format::Shape shape;
  int64_t tokens;
  int64_t panel_begin, panel_end;
};

// Rows outside the panel range and past out_features keep this.
inline constexpr float kUntouched = 123.0f;

// Token t is row index[t] of x, or row t when there is no index. Cells that can read blocks of rows must give
// the same bits then.
inline std::vector<float> multiply(const gemm::Kernel& kernel, const Case& c,
                                   std::span<const std::byte> packed, const std::vector<float>& x,
                                   const std::vector<int32_t>& index, Fine fine = Fine::kNone) {
  const Activations act(kernel, x, c.shape.in_features, index.empty() ? nullptr : index.data(), fine);
  const int64_t stride = (c.panel_end - c.panel_begin) * format::kPanelRows + 3;
  std::vector<float> out(static_cast<size_t>(c.tokens * stride), kUntouched);
  kernel.gemm({packed.data(), c.shape, c.panel_begin, c.panel_end, act.rows, c.tokens, out.data(), stride});
  if (kernel.pack == nullptr) return out;
  const PackedActivations blocks(kernel, act.rows, c.tokens, c.shape.in_features);
  std::vector<float> again(out.size(), kUntouched);
  kernel.gemm(
      {packed.data(), c.shape, c.panel_begin, c.panel_end, blocks.rows, c.tokens, again.data(), stride});
  CHECK(std::memcmp(out.data(), again.data(), out.size() * sizeof(float)) == 0);
  return out;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// in_features must be a multiple of it.
inline int64_t column_step(format::WeightFormat weight) {
  int64_t step = 1;
  while (format::format_info(weight).reject({1, step}) != nullptr) step *= 2;
  return step;
}

inline Case random_case(Rng& rng, format::WeightFormat weight) {
  Case c{};
  c.shape.out_features = pick(rng, 1, 70);
  const int64_t step = column_step(weight);
  c.shape.in_features = step * pick(rng, 1, std::max<int64_t>(2, 384 / step));
  c.tokens = pick(rng, 1, 4) == 1 ? 1 : pick(rng, 1, 40);
  c.panel_begin = pick(rng, 0, c.shape.panels() - 1);
  c.panel_end = pick(rng, c.panel_begin + 1, c.shape.panels());
  return c;
}

inline std::string describe(const gemm::Kernel& kernel, const Case& c) {
  return std::string(kernel.name) + " at [" + std::to_string(c.shape.out_features) + ", " +
         std::to_string(c.shape.in_features) + "], " + std::to_string(c.tokens) + " tokens, panels " +
         std::to_string(c.panel_begin) + " .. " + std::to_string(c.panel_end);
}

}  // namespace proa::test
