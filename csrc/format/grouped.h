// Grouped formats: integer codes with a scale per 16, 32, 64 or 128 columns of a row, and some with a
// minimum.
//
// A format is a struct (int4.h has the smallest); everything else, from packing to the cells of every ISA, is
// written once as templates over it:
//
//   kFormat, kName
//   kBits          of a code: 2, 3, 4, 5, 6 or 8
//   kCodes         what a code stands for: kLinear, itself, or an entry of a table of 16 (CodeKind)
//   kOffset        what stands for the value 0 (0 when there is a minimum)
//   kColumns       of a super-block: 32, 64, 128 or 256
//   kScaleColumns  that share a scale: 16, 32, 64 or 128, at most kColumns
//   kScale         how a scale is stored (ScaleKind)
//   kMinimum       whether groups have a minimum; it is stored as the scales are
//   kRowScale      whether all of a row has one more factor, a float
//   kStep, kReject in_features must be a multiple of kStep, else the reason is kReject
//   raw_spec       the checkpoint arrays (format_info.h)
//   read           static void read(const RawWeight&, int64_t row, int64_t super, int64_t groups,
//                                   GroupedRow<Format>&): one row of a super-block, its first `groups` groups
//
//   value = ((u - kOffset) * scale + minimum) * row scale       u: dot_code(code); the brackets are exact but
//                                                               for one rounding each
//
// Packed: a panel of 16 rows is a run of super-blocks of kColumns columns (the last one may have fewer groups
// of 32 columns), then, with kRowScale, 16 floats at the next multiple of 64 bytes. A super-block:
//
//   codes of each group of 32 columns: kBits words of 64 bytes (16 rows x 4 bytes)
//   kSub and kSubPair: fp16 d [16], with kMinimum fp16 dmin [16]
//   scales: of each kScaleColumns columns [16]
//   minimums, with kMinimum but kSubPair: of each kScaleColumns columns [16]
//
// Codes of 32 columns of a row are 8 quads of 4: quad 2j holds columns 8j, 8j+2, 8j+4, 8j+6, quad 2j+1 the
// odd ones between them, one per byte, first in the lowest. Activations are stored in the same order
// (gemm/quantized_act.h). The words hold the quads by bits:
//
//   bits 0..3 of codes of 4 bits or more: word w = quad 2w | quad 2w+1 << 4             (4 words)
//   bits 0..1 of shorter codes, bits 4..5 of codes of 6: word w = quads 4w .. 4w+3, << 0 2 4 6   (2 words)
//   bit 2 of codes of 3, bit 4 of codes of 5: the word = all quads, quad j << j         (1 word)
//   codes of 8 bits: word w = quad w                                                    (8 words)
//
// lower bits first. So a checkpoint's bytes of two nibbles, low one first, are the words as they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/scalar.h"
#include "format/format_info.h"

namespace proa::format {

inline constexpr int64_t kGroup = 32;

enum class CodeKind : uint8_t { kLinear, kE2m1, kIq4Nl };

// kSub: an int8 times the fp16 d of the super-block (minimums: minus an uint8 below 128 times its dmin).
// kSubPair: the same with 4 bits each in one byte, the scale's low and the minimum's high.
enum class ScaleKind : uint8_t { kBf16, kF16, kE8m0, kE4m3, kSub, kSubPair };

constexpr bool is_sub(ScaleKind kind) noexcept {
  return kind == ScaleKind::kSub || kind == ScaleKind::kSubPair;
}

constexpr bool is_wide(ScaleKind kind) noexcept {
  return kind == ScaleKind::kBf16 || kind == ScaleKind::kF16;
}

// OCP E2M1: 0 .5 1 1.5 2 3 4 6 and their negatives. As integers from 0 up: twice the value, plus 12.
inline constexpr int kE2m1Offset = 12;
inline constexpr uint8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// GGML's IQ4_NL: its 16 values (kvalues_iq4nl of ggml-common.h, the same in gguf's quants.py), plus 128.
inline constexpr int kIq4NlOffset = 128;
inline constexpr uint8_t kIq4NlCodes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                            129, 141, 153, 166, 181, 197, 217, 241};

// What the codes of 4 bits of F stand for, unless they are linear.
template <class F>
inline constexpr const uint8_t* kCodeTable = F::kCodes == CodeKind::kE2m1 ? kE2m1Codes : kIq4NlCodes;

// The largest `dot_code`.
template <class F>
inline constexpr int kLargestCode = F::kCodes == CodeKind::kLinear ? (1 << F::kBits) - 1
                                    : F::kCodes == CodeKind::kE2m1 ? 2 * kE2m1Offset
                                                                   : 241;

// Sizes of the packed layout.
template <class F>
struct GroupedLayout {
  static constexpr int64_t kGroups = F::kColumns / kGroup;
  static constexpr int64_t kGroupBytes = F::kBits * 4 * kPanelRows;
  static constexpr int64_t kScaleBytes = (is_wide(F::kScale) ? 2 : 1) * kPanelRows;  // of one scale, all rows
  static constexpr bool kOwnMins = F::kMinimum && F::kScale != ScaleKind::kSubPair;
  static constexpr int64_t kSuperScaleBytes = is_sub(F::kScale) ? 2 * kPanelRows * (F::kMinimum ? 2 : 1) : 0;
  // Scales of one group; several groups may share one.
  static constexpr int64_t kHalves = F::kScaleColumns < kGroup ? kGroup / F::kScaleColumns : 1;
  static constexpr int64_t kScales = F::kColumns / F::kScaleColumns;

  static constexpr int64_t scales(int64_t groups) noexcept { return groups * kGroup / F::kScaleColumns; }
  // From the codes of a super-block of `groups` groups to its scales and to its minimums.
  static constexpr int64_t scale_offset(int64_t groups) noexcept {
    return groups * kGroupBytes + kSuperScaleBytes;
  }
  static constexpr int64_t min_offset(int64_t groups) noexcept {
    return scale_offset(groups) + (kOwnMins ? scales(groups) * kScaleBytes : 0);
  }
  static constexpr int64_t super_bytes(int64_t groups) noexcept {
    return scale_offset(groups) + scales(groups) * kScaleBytes * (kOwnMins ? 2 : 1);
  }
  static constexpr int64_t row_scale_offset(int64_t in_features) noexcept {
    const int64_t groups = in_features / kGroup;
    const int64_t last = groups % kGroups;
    return ceil_div(groups / kGroups * super_bytes(kGroups) + (last > 0 ? super_bytes(last) : 0), 64) * 64;
  }
  static constexpr int64_t panel_bytes(int64_t in_features) noexcept {
    return row_scale_offset(in_features) + (F::kRowScale ? 4 * kPanelRows : 0);
  }
};

// One row of a super-block, as `read` hands it over.
template <class F>
struct GroupedRow {
  using Layout = GroupedLayout<F>;
  using Scale = std::conditional_t<is_wide(F::kScale), uint16_t, uint8_t>;

  uint32_t words[Layout::kGroups][F::kBits] = {};
  uint16_t d = 0, dmin = 0;  // kSub and kSubPair
  Scale scales[Layout::kScales] = {};
  Scale mins[Layout::kScales] = {};
};

// Byte of a quad-ordered group of 32 at which column c stands.
constexpr int64_t quad_position(int64_t c) noexcept { return c / 8 * 8 + c % 2 * 4 + c % 8 / 2; }

// The words of a group from its codes in the order of columns.
template <int kBits>
inline void words_from_codes(const uint8_t* codes, uint32_t* words) noexcept {
  uint32_t quads[8];
  for (int j = 0; j < 4; ++j) {
    uint64_t columns;
    std::memcpy(&columns, codes + 8 * j, 8);
    for (int odd = 0; odd < 2; ++odd, columns >>= 8) {
      uint64_t bytes = columns & 0x00ff00ff00ff00ffull;
      bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffull;
      quads[2 * j + odd] = static_cast<uint32_t>(bytes | bytes >> 16);
    }
  }
  const auto pack = [&](int bits, int shift, uint32_t* dst) {
    const int per_word = 8 / bits;
    const uint32_t mask = 0x01010101u * ((1u << bits) - 1);
    for (int w = 0; w < bits; ++w) {
      dst[w] = 0;
      for (int i = 0; i < per_word; ++i) dst[w] |= (quads[per_word * w + i] >> shift & mask) << (bits * i);
    }
  };
  constexpr int kLow = kBits >= 8 ? 8 : kBits >= 4 ? 4 : 2;
  pack(kLow, 0, words);
  if constexpr (kBits > kLow) pack(kBits - kLow, kLow, words + kLow);
}

// The code of column c of a group whose words stand `stride` words apart.
template <int kBits>
inline int code_of_words(const uint32_t* words, int64_t stride, int64_t c) noexcept {
  const int64_t quad = quad_position(c) / 4, byte = quad_position(c) % 4;
  const auto bits_of = [&](int64_t bits, int64_t first_word) {
    const int64_t per_word = 8 / bits;
    const uint32_t word = words[(first_word + quad / per_word) * stride];
    return static_cast<int>(word >> (8 * byte + bits * (quad % per_word)) & ((1u << bits) - 1));
  };
  constexpr int kLow = kBits >= 8 ? 8 : kBits >= 4 ? 4 : 2;
  int code = bits_of(kLow, 0);
  if constexpr (kBits > kLow) code |= bits_of(kBits - kLow, kLow) << kLow;
  return code;
}

// The unsigned code that integer dot products take.
template <class F>
constexpr int dot_code(int code) noexcept {
  return F::kCodes == CodeKind::kLinear ? code : kCodeTable<F>[code];
}

// E2M1 codes are twice the values.
template <class F>
inline constexpr float kCodeUnit = F::kCodes == CodeKind::kE2m1 ? 0.5f : 1.0f;

inline float scale_value(ScaleKind kind, uint32_t bits) noexcept {
  switch (kind) {
    case ScaleKind::kBf16:
      return base::bf16_to_f32(static_cast<uint16_t>(bits));
    case ScaleKind::kF16:
      return base::fp16_to_f32(static_cast<uint16_t>(bits));
    case ScaleKind::kE8m0:
      return base::e8m0_to_f32(static_cast<uint8_t>(bits));
    case ScaleKind::kE4m3:
      return base::fp8_e4m3_to_f32(static_cast<uint8_t>(bits));
    case ScaleKind::kSub:
      return static_cast<float>(static_cast<int8_t>(bits));
    case ScaleKind::kSubPair:
      return static_cast<float>(bits & 0x0f);
  }
  return 0.0f;
}

// Scalar access to a packed panel: what every cell has to agree with.
template <class F>
class GroupedPanel {
 public:
  using Layout = GroupedLayout<F>;

  GroupedPanel(const std::byte* panel, int64_t in_features) noexcept
      : panel_(panel), in_features_(in_features) {}

  // dot_code of an element.
  int code(int64_t row, int64_t k) const noexcept {
    const int64_t group = k / kGroup;
    const auto* words =
        reinterpret_cast<const uint32_t*>(super(group) + group % Layout::kGroups * Layout::kGroupBytes);
    return dot_code<F>(code_of_words<F::kBits>(words + row, kPanelRows, k % kGroup));
  }

  // Of the column k; for codes as `code` has them.
  float scale(int64_t row, int64_t k) const noexcept {
    const float value = scale_value(F::kScale, scale_bits(row, k, Layout::scale_offset(groups_at(k))));
    if constexpr (is_sub(F::kScale)) return value * super_scale(row, k, 0);
    return value * kCodeUnit<F>;
  }

  float minimum(int64_t row, int64_t k) const noexcept {
    if constexpr (!F::kMinimum) return 0.0f;
    const uint32_t bits = scale_bits(row, k, Layout::min_offset(groups_at(k)));
    const float value = scale_value(F::kScale, Layout::kOwnMins ? bits : bits >> 4);
    if constexpr (is_sub(F::kScale)) return -(value * super_scale(row, k, 1));
    return value;
  }

  float row_scale(int64_t row) const noexcept {
    if constexpr (!F::kRowScale) return 1.0f;
    float value;
    std::memcpy(&value, panel_ + Layout::row_scale_offset(in_features_) + 4 * row, 4);
    return value;
  }

 private:
  const std::byte* super(int64_t group) const noexcept {
    return panel_ + group / Layout::kGroups * Layout::super_bytes(Layout::kGroups);
  }
  // Groups of the super-block of column k.
  int64_t groups_at(int64_t k) const noexcept {
    const int64_t first = k / kGroup / Layout::kGroups * Layout::kGroups;
    return std::min(Layout::kGroups, in_features_ / kGroup - first);
  }
  uint32_t scale_bits(int64_t row, int64_t k, int64_t offset) const noexcept {
    typename GroupedRow<F>::Scale bits;
    std::memcpy(&bits,
                super(k / kGroup) + offset + k % F::kColumns / F::kScaleColumns * Layout::kScaleBytes +
                    static_cast<int64_t>(sizeof bits) * row,
                sizeof bits);
    return bits;
  }
  // d (0) or dmin (1).
  float super_scale(int64_t row, int64_t k, int64_t which) const noexcept {
    uint16_t bits;
    std::memcpy(&bits,
                super(k / kGroup) + groups_at(k) * Layout::kGroupBytes + which * 2 * kPanelRows + 2 * row, 2);
    return base::fp16_to_f32(bits);
  }

  const std::byte* panel_;
  int64_t in_features_;
};

template <class F>
inline float decode_grouped(const std::byte* panel, int64_t in_features, int64_t row, int64_t k) noexcept {
  const GroupedPanel<F> weight(panel, in_features);
  const float product = static_cast<float>(weight.code(row, k) - F::kOffset) * weight.scale(row, k);
  const float value = F::kMinimum ? product + weight.minimum(row, k) : product;
  return F::kRowScale ? value * weight.row_scale(row) : value;
}

template <class F>
inline void write_row(const GroupedRow<F>& src, int64_t groups, int64_t row, std::byte* super) noexcept {
  using Layout = GroupedLayout<F>;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t w = 0; w < F::kBits; ++w)
      std::memcpy(super + g * Layout::kGroupBytes + 4 * (w * kPanelRows + row), &src.words[g][w], 4);
  if constexpr (is_sub(F::kScale)) {
    std::byte* dst = super + groups * Layout::kGroupBytes + 2 * row;
    std::memcpy(dst, &src.d, 2);
    if constexpr (F::kMinimum) std::memcpy(dst + 2 * kPanelRows, &src.dmin, 2);
  }
  constexpr size_t kSize = sizeof(typename GroupedRow<F>::Scale);
  for (int64_t i = 0; i < Layout::scales(groups); ++i) {
    const int64_t offset = i * Layout::kScaleBytes + static_cast<int64_t>(kSize) * row;
    std::memcpy(super + Layout::scale_offset(groups) + offset, &src.scales[i], kSize);
    if constexpr (Layout::kOwnMins)
      std::memcpy(super + Layout::min_offset(groups) + offset, &src.mins[i], kSize);
  }
}

// A row that decodes to 0.
template <class F>
inline GroupedRow<F> zero_row() noexcept {
  GroupedRow<F> row;
  uint8_t codes[kGroup];
  std::fill_n(codes, kGroup, static_cast<uint8_t>(F::kCodes == CodeKind::kLinear ? F::kOffset : 0));
  for (auto& words : row.words) words_from_codes<F::kBits>(codes, words);
  return row;
}

template <class F>
inline void pack_grouped(const RawWeight& raw, int64_t panel, std::byte* dst) noexcept {
  using Layout = GroupedLayout<F>;
  const int64_t all_groups = raw.shape.in_features / kGroup, num_rows = rows_of_panel(raw.shape, panel);
  const GroupedRow<F> zero = zero_row<F>();
  GroupedRow<F> row;
  std::byte* super = dst;
  for (int64_t first = 0; first < all_groups; first += Layout::kGroups) {
    const int64_t groups = std::min(Layout::kGroups, all_groups - first);
    for (int64_t r = 0; r < num_rows; ++r) {
      F::read(raw, panel * kPanelRows + r, first / Layout::kGroups, groups, row);
      write_row<F>(row, groups, r, super);
    }
    for (int64_t r = num_rows; r < kPanelRows; ++r) write_row<F>(zero, groups, r, super);
    super += Layout::super_bytes(groups);
  }
  if constexpr (F::kRowScale) {
    const auto factors = reinterpret_cast<float*>(dst + Layout::row_scale_offset(raw.shape.in_features));
    std::fill_n(factors, kPanelRows, raw.global_scale);
  }
}

template <class F>
inline const char* reject_grouped(const Shape& shape) noexcept {
  return shape.in_features % F::kStep == 0 ? nullptr : F::kReject;
}

// The row of the format in the table of formats.
template <class F>
inline constexpr FormatInfo kGroupedInfo = {F::kFormat,      F::kName,          reject_grouped<F>,
                                            F::raw_spec,     F::kRowScale,      GroupedLayout<F>::panel_bytes,
                                            pack_grouped<F>, decode_grouped<F>, F::kMinimum};

}  // namespace proa::format
