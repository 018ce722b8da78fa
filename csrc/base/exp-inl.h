// e^x of a vector of floats <= 89, the same operations and so the same bits in every ISA. Include inside the
// ISA's target region and namespace. V has a static set1, and these functions stand beside it: fma(a, b, c) =
// a * b + c, sub, mul, zero_below(x, limit, value) = x < limit ? 0 : value, and power_of_two(t) = 2^n for
// t = 1.5 * 2^23 + n with integral n in -126 .. 127, anything for other t.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r is a polynomial fitted by weighted least squares on Chebyshev
// nodes (relative error 2^-27), e^x = 2 e^r 2^(n-1), as n reaches 128. At most 2 ulp off
// (ops_kernels_test.cc). 0 below -86.5, just above where results stop being normal floats, which would be
// slow to compute with; infinite where e^x is beyond float; NaN stays NaN.
template <class V>
inline V vec_exp(V x) {
  // Adding it rounds x / ln 2 to an integer and takes 1 off; n - 1 then stands in the low mantissa bits.
  const V magic = V::set1(0x1.8p23f - 1.0f);
  const V t = fma(x, V::set1(0x1.715476p0f), magic);
  const V n = sub(t, magic);
  // ln 2 in two parts; the first has 15 significant bits, so n (8 bits) times it is exact.
  const V r = fma(n, V::set1(-0x1.7f7d1cp-20f), fma(n, V::set1(-0x1.62e4p-1f), x));
  V p = fma(V::set1(0x1.6a2348p-10f), r, V::set1(0x1.123a6cp-7f));
  p = fma(p, r, V::set1(0x1.5558f4p-5f));
  p = fma(p, r, V::set1(0x1.555490p-3f));
  p = fma(p, r, V::set1(0x1.fffffcp-2f));
  const V twice = fma(fma(p, mul(r, r), r), V::set1(2.0f), V::set1(2.0f));
  return zero_below(x, V::set1(-86.5f), mul(twice, power_of_two(t)));
}
