// e^x for x <= 88, the same operations in every ISA. x = n ln 2 + r with |r| <= ln 2 / 2; e^r is a polynomial
// fitted by weighted least squares on Chebyshev nodes (relative error 2^-27), e^x = e^r 2^n. Below -87.3,
// where e^x leaves the normal range, the result is 0. At most 2 ulp off (see ops_test.cc).
inline F16 exp16(F16 x) {
  const F16 magic =
      set1(0x1.8p23f);  // adding it rounds to an integer, which then stands in the low mantissa bits
  const F16 t = fma(x, set1(0x1.715476p0f), magic);
  const F16 n = sub(t, magic);
  // ln 2 in two parts; the first has 15 significant bits, so n (8 bits) times it is exact.
  const F16 r = fma(n, set1(-0x1.7f7d1cp-20f), fma(n, set1(-0x1.62e4p-1f), x));
  F16 p = fma(set1(0x1.6a2348p-10f), r, set1(0x1.123a6cp-7f));
  p = fma(p, r, set1(0x1.5558f4p-5f));
  p = fma(p, r, set1(0x1.555490p-3f));
  p = fma(p, r, set1(0x1.fffffcp-2f));
  const F16 e = add(fma(p, mul(r, r), r), set1(1.0f));
  return zero_below(x, set1(-87.3f), mul(e, power_of_two(t)));
}

inline void exp_row(const float* x, int64_t size, float* y) noexcept {
  for (int64_t i = 0; i < size; i += 16) store(y + i, exp16(load(x + i)));
}
