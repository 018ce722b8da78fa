// e4m3 to bf16, four panel columns at a time. Include inside a target region with VBMI, in the ISA's
// namespace.

// Every e4m3 magnitude is a bf16 exactly.
struct alignas(64) Tables {
  uint8_t order[64];
  uint8_t low[128];
  uint8_t high[128];
};

constexpr Tables make_tables() {
  Tables tables{};
  for (int lane = 0; lane < 4; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int column = 0; column < 4; ++column)
        tables.order[16 * lane + 8 * (column / 2) + 2 * i + column % 2] =
            static_cast<uint8_t>(format::kPanelRows * column + 4 * lane + i);
  for (uint32_t byte = 0; byte < 128; ++byte) {
    const uint32_t bits = std::bit_cast<uint32_t>(base::fp8_e4m3_to_f32(static_cast<uint8_t>(byte)));
    tables.low[byte] = static_cast<uint8_t>(bits >> 16);
    tables.high[byte] = static_cast<uint8_t>(bits >> 24);
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// Dword r of `first`: columns 0 (low half) and 1 of row r; of `second`: columns 2 and 3.
struct Fp8Pairs {
  __m512i first, second;
};

// Two table look-ups give the upper and lower byte of the bf16 with the magnitude of each of 64 bytes; the
// sign joins the upper one. The bytes are first brought in an order in which unpacking them pairwise leaves
// columns 0 | 1 of a row (then 2 | 3) in the halves of one dword.
inline Fp8Pairs widen_fp8(__m512i line) noexcept {
  const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(kTables.order), line);
  const __m512i low =
      _mm512_permutex2var_epi8(_mm512_load_si512(kTables.low), bytes, _mm512_load_si512(kTables.low + 64));
  const __m512i magnitude =
      _mm512_permutex2var_epi8(_mm512_load_si512(kTables.high), bytes, _mm512_load_si512(kTables.high + 64));
  // magnitude | (bytes & 0x80)
  const __m512i high =
      _mm512_ternarylogic_epi32(magnitude, bytes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
  return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
}
