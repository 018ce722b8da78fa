// Blocks of 16 rows of int8 activations (gemm::ActRows): what the tiles of grouped.cc read. Include inside
// its namespace.

// A tiled block: of each chunk of columns the tiles of q, or of q | high where a group of a row is fine; the
// scales of all groups [groups][16]; of each chunk whether it has high planes.
struct BlockLayout {
  int64_t scales, fine;  // where they begin

  explicit constexpr BlockLayout(int64_t in_features) noexcept
      : scales(2 * in_features * kTileRows),
        fine(scales + in_features / kGroup * kTileRows * static_cast<int64_t>(sizeof(float))) {}
};

// The flags of a chunk's groups, as bits.
inline uint32_t fine_groups(const QuantizedRow& row, const Chunk& chunk) noexcept {
  const auto mask = static_cast<__mmask32>((uint64_t{1} << chunk.groups) - 1);
  const __m256i flags = _mm256_maskz_loadu_epi8(mask, row.fine + chunk.first_group);
  return _mm256_test_epi8_mask(flags, flags);
}

inline __m256i load_32(const int8_t* src) noexcept {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
}

// Both planes of a chunk of one token: of each group q, then high; `step` bytes from a group to the next.
void join_planes(const QuantizedRow& row, const Chunk& chunk, uint32_t fine, int64_t step,
                 std::byte* dst) noexcept {
  for (int64_t g = 0; g < chunk.groups; ++g, dst += step) {
    const int64_t k = (chunk.first_group + g) * kGroup;
    const __m256i high = (fine >> g & 1) != 0 ? load_32(row.high + k) : _mm256_setzero_si256();
    _mm512_store_si512(dst, _mm512_inserti64x4(_mm512_castsi256_si512(load_32(row.q + k)), high, 1));
  }
}

template <class F>
void pack(const std::byte* const* rows, int64_t count, int64_t in_features, std::byte* block) noexcept {
  const BlockLayout layout(in_features);
  const int64_t groups = in_features / kGroup;
  for (Chunk chunk{0, 0, 0, count}; chunk.first_group < groups; chunk.first_group += kChunkGroups) {
    chunk.groups = std::min(kChunkGroups, groups - chunk.first_group);
    QuantizedRow row[kTileRows];
    uint32_t fine[kTileRows], any = 0;
    for (int64_t m = 0; m < count; ++m) {
      row[m] = quantized_row<F>(rows[m], in_features);
      any |= fine[m] = fine_groups(row[m], chunk);
    }
    block[layout.fine + chunk.first_group / kChunkGroups] = std::byte{any != 0};
    std::byte* tiles = block + 2 * chunk.first_group * kGroup * kTileRows;
    auto* scales = reinterpret_cast<float*>(block + layout.scales) + chunk.first_group * kTileRows;
    for (int64_t m = 0; m < count; ++m) {
      if (any != 0)
        join_planes(row[m], chunk, fine[m], 2 * kGroup * kTileRows, tiles + m * 2 * kGroup);
      else
        for (int64_t g = 0; g < chunk.groups; ++g)
          _mm256_store_si256(reinterpret_cast<__m256i*>(tiles + (g * kTileRows + m) * kGroup),
                             load_32(row[m].q + (chunk.first_group + g) * kGroup));
      for (int64_t g = 0; g < chunk.groups; ++g)
        scales[g * kTileRows + m] = row[m].scale[chunk.first_group + g];
    }
  }
}
