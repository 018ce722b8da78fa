// How many bits int8 activations get: one plane of int8 a column, or a second one where it is needed.
//
// Rounding a group of n columns to multiples of d = absmax / 127 leaves an error of d / sqrt(12) a column
// (uniform), n * d^2 / 12 in all. A row may have so much of it that its relative error is the budget. If one
// plane everywhere would leave more, the groups with the largest absmax get two, as few as are needed.
//
// An expert layer computes down(silu(g) * u), g = gate(x), u = up(x). With errors of x and of the product h
// relative to their norms, e^2 = a * e_x^2 + e_h^2, where a = 1 + var(g) * E[silu'(g)^2] / E[silu(g)^2] <=
// 2.07 for normal g of any width. Of the 1.2e-2 that int8 cells may have, `act_budget` leaves 2 % for what
// the groups with two planes add: 8 times finer in groups of 32, sqrt(32 / 12) / 1016 = 1.6e-3 where one
// column rules each (docs/decisions/0009-two-planes-where-needed.md).
#pragma once

#include <cstdint>

#include "format/format_info.h"
#include "gemm/kernel.h"

namespace proa::gemm {

// Relative L2 errors: of the inputs of gate, up and plain linears, and of down's. 0: two planes everywhere.
struct ActBudget {
  float input, product;
};

// What normal inputs leave with one plane is 5.4e-3 in groups of 32, 6.5e-3 in groups of 128. Weights with a
// minimum may be nearly the same in all rows, and what they make of an input small beside its error: with
// them a product has two planes everywhere, a row above its budget in all groups with absmax / 127 above the
// average.
inline ActBudget act_budget(const Kernel& kernel) noexcept {
  if (kernel.act == ActFormat::kInt16G128) return {6.7e-3f, 6.5e-3f};
  return {5.6e-3f, format::format_info(kernel.weight).has_minimum ? 0.0f : 8.6e-3f};
}

// `quantize` with it gives every group two planes.
inline constexpr float kAllFine = -1.0f;

// What `quantize` of a whole row x [in_features] takes: groups whose absmax is larger get two planes. The
// same on every ISA. 0 if the budget is. Infinity if one plane is enough, if x has a NaN or an infinity, or
// squares of it (magnitudes of 2^60) that are not finite.
float fine_above(const Kernel& kernel, const float* x, int64_t in_features, float budget) noexcept;

}  // namespace proa::gemm
