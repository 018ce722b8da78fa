// exp and silu for the vector type `Vec` of an ISA, the same bits for every ISA. Include inside the ISA's
// target region and namespace, after Vec with: set1, fma(a, b, c) = a * b + c, add, sub, mul, div, min, max
// (second operand when either is NaN), round_even, pow2(n) = 2^n for integral n in -126 .. 127.
//
// Error below 2 ulp. exp(x) is 0 below about -103.97 and infinite above 88.73; NaN stays NaN.

inline Vec vec_exp(Vec x) {
  const Vec clamped = Vec::min(Vec::set1(89.0f), Vec::max(Vec::set1(-104.0f), x));
  // x = n ln 2 + r with |r| <= ln(2) / 2; ln 2 in two parts, so that r is exact to the last bit.
  const Vec n = Vec::round_even(Vec::mul(clamped, Vec::set1(0x1.715476p+0f)));
  Vec r = Vec::fma(n, Vec::set1(-0x1.62e4p-1f), clamped);
  r = Vec::fma(n, Vec::set1(-0x1.7f7d1cp-20f), r);
  // Taylor to r^7: the remainder is below 2^-27.
  Vec p = Vec::set1(1.0f / 5040.0f);
  p = Vec::fma(p, r, Vec::set1(1.0f / 720.0f));
  p = Vec::fma(p, r, Vec::set1(1.0f / 120.0f));
  p = Vec::fma(p, r, Vec::set1(1.0f / 24.0f));
  p = Vec::fma(p, r, Vec::set1(1.0f / 6.0f));
  p = Vec::fma(p, r, Vec::set1(0.5f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  // Two factors: n reaches -150 and 128, beyond one float exponent.
  const Vec half = Vec::round_even(Vec::mul(n, Vec::set1(0.5f)));
  return Vec::mul(Vec::mul(p, Vec::pow2(half)), Vec::pow2(Vec::sub(n, half)));
}

// x / (1 + exp(-x))
inline Vec vec_silu(Vec x) {
  const Vec e = vec_exp(Vec::sub(Vec::set1(0.0f), x));
  return Vec::div(x, Vec::add(Vec::set1(1.0f), e));
}
