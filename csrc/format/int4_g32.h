// int4_g32: signed 4-bit weights q stored as u = q + 8, one bf16 scale per row and 32 columns; value = (u -
// 8) * scale. A panel is in/32 blocks of 288 bytes, one per 32 columns (one group g = columns 32g .. 32g+31):
//
//   byte   0              64             128            192            256 .. 287
//          word 0         word 1         word 2         word 3         16 x bf16 scale
//          r0 r1 .. r15   r0 r1 .. r15   r0 r1 .. r15   r0 r1 .. r15   r0 r1 .. r15
//   word j of a row: the 4 checkpoint bytes of columns 8j .. 8j+7, unchanged
//     byte 0        byte 1        byte 2        byte 3
//     8j+1 | 8j+0   8j+3 | 8j+2   8j+5 | 8j+4   8j+7 | 8j+6      (high nibble | low nibble)
//
// So one 64-byte load gives two u8 quads per row: `& 0x0f` the even columns, `>> 4` the odd ones. Activations
// are stored in the same even/odd order (gemm/quantized_act.h), and the integer dot product does not depend
// on it.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/scalar.h"
#include "format/format_info.h"

namespace proa::format::int4_g32 {

inline constexpr int64_t kWords = 4;                   // 8 columns each
inline constexpr int64_t kWordBytes = 4 * kPanelRows;  // one word of all 16 rows
inline constexpr int64_t kNibbleBytes = kWords * kWordBytes;
inline constexpr int64_t kBlockBytes = kNibbleBytes + 2 * kPanelRows;  // 288
inline constexpr int kOffset = 8;
// A padded row must decode to 0: u = 8 in every nibble.
inline constexpr uint32_t kZeroWord = 0x88888888u;

inline void encode_row(const std::byte* words, uint16_t scale, int64_t row, std::byte* block) noexcept {
  for (int64_t j = 0; j < kWords; ++j) std::memcpy(block + j * kWordBytes + 4 * row, words + 4 * j, 4);
  std::memcpy(block + kNibbleBytes + 2 * row, &scale, 2);
}

inline const char* reject(const Shape& shape) noexcept {
  return shape.in_features % kInt4Group == 0 ? nullptr : "in_features is not a multiple of the group of 32";
}

inline RawSpec raw_spec(const Shape& shape, RawLayout layout) noexcept {
  if (layout != RawLayout::kRows) return {};
  return {matrix(Element::kCode, shape.out_features, shape.in_features / 2),
          matrix(Element::kBf16, shape.out_features, shape.in_features / kInt4Group)};
}

inline int64_t panel_bytes(int64_t in_features) noexcept { return in_features / kInt4Group * kBlockBytes; }

inline void pack_panel(const RawWeight& raw, int64_t panel_index, std::byte* panel) noexcept {
  static constexpr uint32_t kZeroRow[kWords] = {kZeroWord, kZeroWord, kZeroWord, kZeroWord};
  const int64_t in = raw.shape.in_features, groups = in / kInt4Group;
  const int64_t num_rows = rows_of_panel(raw.shape, panel_index);
  const auto* src = static_cast<const std::byte*>(raw.data) + panel_index * kPanelRows * (in / 2);
  const auto* scales = static_cast<const uint16_t*>(raw.scales) + panel_index * kPanelRows * groups;
  for (int64_t g = 0; g < groups; ++g, panel += kBlockBytes) {
    for (int64_t r = 0; r < num_rows; ++r)
      encode_row(src + r * (in / 2) + g * (kInt4Group / 2), scales[r * groups + g], r, panel);
    for (int64_t r = num_rows; r < kPanelRows; ++r)
      encode_row(reinterpret_cast<const std::byte*>(kZeroRow), 0, r, panel);
  }
}

// q in -8 .. 7.
inline int decode_q(const std::byte* panel, int64_t row, int64_t k) noexcept {
  const std::byte* block = panel + k / kInt4Group * kBlockBytes;
  const int64_t column = k % kInt4Group;
  const auto pair = static_cast<unsigned>(block[column / 8 * kWordBytes + 4 * row + column % 8 / 2]);
  return static_cast<int>(column % 2 == 0 ? pair & 0x0fu : pair >> 4) - kOffset;
}

inline float decode_scale(const std::byte* panel, int64_t row, int64_t group) noexcept {
  uint16_t bits;
  std::memcpy(&bits, panel + group * kBlockBytes + kNibbleBytes + 2 * row, 2);
  return base::bf16_to_f32(bits);
}

inline float decode_element(const std::byte* panel, int64_t, int64_t row, int64_t k) noexcept {
  return static_cast<float>(decode_q(panel, row, k)) * decode_scale(panel, row, k / kInt4Group);
}

inline constexpr FormatInfo kInfo = {
    WeightFormat::kInt4G32, "int4_g32", reject, raw_spec, false, panel_bytes, pack_panel, decode_element};

}  // namespace proa::format::int4_g32
