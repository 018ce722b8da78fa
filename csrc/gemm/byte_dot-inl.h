// `dot_quads` from products of bytes that are added in pairs with saturation to int16. Include inside an
// ISA's target region and namespace, after `Bytes`, which names the instructions.
//
// A pair is at most 2 * (largest code) * 127; as many pairs are added as int16 holds. Codes above 127 would
// saturate in one pair: their upper 7 bits (32258 a pair) and the lowest one are multiplied apart.

template <class F>
inline typename Bytes::Reg dot_quads(typename Bytes::Reg dot, const typename Bytes::Reg (&quads)[8],
                                     int first, int count, const int8_t* q) noexcept {
  constexpr bool kWide = format::kLargestCode<F> > 127;
  constexpr int kFits = kWide ? 1 : INT16_MAX / (2 * format::kLargestCode<F> * 127);
  static_assert(kFits >= 1);
  const auto ones = Bytes::set_words(1);
  auto pairs = Bytes::zero(), odd = Bytes::zero();
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    int32_t bytes;
    std::memcpy(&bytes, q + 4 * (first + i), 4);
    const auto quad = Bytes::set_quad(bytes);
    if constexpr (kWide) {
      const auto upper = Bytes::multiply(Bytes::upper7(quads[first + i]), quad);
      dot = Bytes::add32(dot, Bytes::widen(upper, Bytes::set_words(2)));
      odd = Bytes::add16(odd, Bytes::multiply(Bytes::lowest(quads[first + i]), quad));
      continue;
    }
    const auto product = Bytes::multiply(quads[first + i], quad);
    pairs = i % kFits == 0 ? product : Bytes::add16(pairs, product);
    if (i % kFits == kFits - 1 || i == count - 1) dot = Bytes::add32(dot, Bytes::widen(pairs, ones));
  }
  return kWide ? Bytes::add32(dot, Bytes::widen(odd, ones)) : dot;
}
