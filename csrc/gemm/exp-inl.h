// silu of a `Vec`. Include inside the ISA's target region and namespace, after Vec.

// The names that base/exp-inl.h calls.
inline Vec fma(Vec a, Vec b, Vec c) { return Vec::fma(a, b, c); }
inline Vec sub(Vec a, Vec b) { return Vec::sub(a, b); }
inline Vec mul(Vec a, Vec b) { return Vec::mul(a, b); }
inline Vec zero_below(Vec x, Vec limit, Vec value) { return Vec::zero_below(x, limit, value); }
inline Vec power_of_two(Vec t) { return Vec::power_of_two(t); }

#include "base/exp-inl.h"

// x / (1 + exp(-x)); e^89 is infinite already.
inline Vec vec_silu(Vec x) {
  const Vec e = vec_exp(Vec::min(Vec::set1(89.0f), Vec::sub(Vec::set1(0.0f), x)));
  return Vec::div(x, Vec::add(Vec::set1(1.0f), e));
}
