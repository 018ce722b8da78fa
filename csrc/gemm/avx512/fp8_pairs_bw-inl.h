// e4m3 to bf16, four panel columns at a time, where VBMI is missing. Include inside a target region with
// AVX-512 BW, in the ISA's namespace.

struct alignas(64) Tables {
  uint32_t dwords[16];  // dword c of lane l: rows 4l .. 4l + 3 of column c
  uint8_t order[16];    // of a lane: columns 0 and 1 of a row next to each other, then 2 and 3
  uint8_t low[16];      // bytes of the bf16 of the magnitudes below 16
  uint8_t high[16];
};

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t i = 0; i < 16; ++i) {
    tables.dwords[i] = 4 * (i % 4) + i / 4;
    tables.order[8 * (i / 8) + i % 8] = static_cast<uint8_t>(i / 8 * 8 + i % 8 / 2 + i % 2 * 4);
    const uint32_t bits = std::bit_cast<uint32_t>(base::fp8_e4m3_to_f32(static_cast<uint8_t>(i)));
    tables.low[i] = static_cast<uint8_t>(bits >> 16);
    tables.high[i] = static_cast<uint8_t>(bits >> 24);
  }
  return tables;
}

constexpr Tables kTables = make_tables();

inline __m512i each_lane(const uint8_t (&table)[16]) noexcept {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// Dword r of `first`: columns 0 (low half) and 1 of row r; of `second`: columns 2 and 3.
struct Fp8Pairs {
  __m512i first, second;
};

// A normal magnitude m is the bf16 16 m + 0x3c00: the exponents are 120 apart. Below 16, where the subnormals
// are, both bytes come from tables. The one NaN pattern gets all exponent bits.
inline Fp8Pairs widen_fp8(__m512i line) noexcept {
  const __m512i bytes = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(_mm512_load_si512(kTables.dwords), line),
                                            each_lane(kTables.order));
  const __m512i magnitude = _mm512_and_si512(bytes, _mm512_set1_epi8(0x7f));
  const __mmask64 small = _mm512_testn_epi8_mask(bytes, _mm512_set1_epi8(0x70));
  const __mmask64 nan = _mm512_cmpeq_epi8_mask(magnitude, _mm512_set1_epi8(0x7f));
  __m512i low = _mm512_and_si512(_mm512_slli_epi16(bytes, 4), _mm512_set1_epi8(static_cast<char>(0xf0)));
  __m512i high = _mm512_and_si512(_mm512_srli_epi16(magnitude, 4), _mm512_set1_epi8(0x0f));
  high = _mm512_add_epi8(high, _mm512_set1_epi8(0x3c));
  low = _mm512_mask_shuffle_epi8(low, small, each_lane(kTables.low), magnitude);
  high = _mm512_mask_shuffle_epi8(high, small, each_lane(kTables.high), magnitude);
  high = _mm512_mask_mov_epi8(high, nan, _mm512_set1_epi8(0x7f));
  // high | (bytes & 0x80)
  high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}
