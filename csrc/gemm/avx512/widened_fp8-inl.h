// Floats of four e4m3 columns from widen_fp8. Include inside the target region and namespace, after it and
// Vec.

inline void split_pairs(__m512i pairs, Vec& first, Vec& second) {
  first.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

inline void load_fp8_line(const std::byte* line, Vec (&columns)[4]) {
  const Fp8Pairs pairs = widen_fp8(_mm512_loadu_si512(line));
  split_pairs(pairs.first, columns[0], columns[1]);
  split_pairs(pairs.second, columns[2], columns[3]);
}
