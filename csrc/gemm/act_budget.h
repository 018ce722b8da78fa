// How many bits int8 activations get: one plane of int8 a column, or a second one where it is needed.
//
// Rounding a group of n columns to multiples of d = absmax / 127 leaves an error of d / sqrt(12) a column
// (uniform), n * d^2 / 12 in all. A token x may have kActError * |x|. If one plane everywhere would leave
// more, the groups with absmax > c * rms(x), c = kActError * 127 * sqrt(12), get two. The others then have at
// most kActError^2 * rms(x)^2 a column, so the token keeps to its budget whatever its distribution is.
//
// An expert layer computes down(silu(g) * u), g = gate(x), u = up(x). With errors of x and of the product h
// relative to their norms, e^2 = a * e_x^2 + e_h^2, where a = 1 + E[(g silu'(g))^2] / E[silu(g)^2] <= 2.1 for
// normal g of any width. h always has two planes: 8 times finer (groups of 32), so e_h <= sqrt(32 / 12) /
// 1016 = 1.6e-3 even where one column rules its group. kActError = 7.5e-3 then gives e <= 1.12e-2, within the
// 1.2e-2 that int8 cells may have (docs/decisions/0009-two-planes-where-needed.md).
#pragma once

#include <cstdint>

#include "gemm/kernel.h"

namespace proa::gemm {

inline constexpr float kActError = 7.5e-3f;

// `quantize` with it gives every group two planes.
inline constexpr float kAllFine = -1.0f;

// What `quantize` of a whole token x [in_features] takes: groups whose absmax is larger get two planes. The
// same on every ISA. Infinity if one plane is enough, if x has a NaN or an infinity, or squares of it
// (magnitudes of 2^60) that are not finite.
float fine_above(ActFormat act, const float* x, int64_t in_features) noexcept;

}  // namespace proa::gemm
