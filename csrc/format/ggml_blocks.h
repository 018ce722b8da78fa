// The blocks of quantized GGML types, taken apart: GGUF files hold a row as blocks of 32 or 256 elements.
//
// A reader has kElements, kBytes and `read`, which turns one block into the code of every element, in the
// order of the elements, and the numbers its scales are made of. Layouts follow ggml-common.h of ggml; what
// an element means is said at each reader. Bits are numbered from 0; d, m, dmin are fp16; bytes in file
// order:
//
//   Q4_0, IQ4_NL  d | qs[16]                             Q2_K   scales[16] | qs[64] | d | dmin
//   Q4_1   d | m | qs[16]                                Q3_K   high[32] | qs[64] | scales[12] | d
//   Q5_0   d | high[4] | qs[16]                          Q4_K   d | dmin | scales[12] | qs[128]
//   Q5_1   d | m | high[4] | qs[16]                      Q5_K   d | dmin | scales[12] | high[32] | qs[128]
//   Q8_0   d | q[32]                                     Q6_K   ql[128] | qh[64] | scales[16] | d
//   MXFP4  e | qs[16]
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace proa::format::ggml {

// `scales`, `mins`: one per 32 or 16 elements. Fields that a type lacks are left as they are.
template <int N>
struct Block {
  uint8_t codes[N];
  uint16_t d;
  uint16_t min;
  uint8_t scales[N / 16];
  uint8_t mins[N / 16];
};

inline uint16_t read_u16(const uint8_t* src) noexcept {
  uint16_t value;
  std::memcpy(&value, src, 2);
  return value;
}

// N codes of `kBits` bits from N * kBits / 8 bytes: byte i holds those of elements i, i + stride, i + 2
// stride
// .., the first in its lowest bits, where stride is the number of bytes.
template <int kBits, int kStride>
inline void read_strided(const uint8_t* src, uint8_t* codes) noexcept {
  for (int part = 0; part < 8 / kBits; ++part)
    for (int i = 0; i < kStride; ++i)
      codes[part * kStride + i] = static_cast<uint8_t>(src[i] >> (part * kBits) & ((1 << kBits) - 1));
}

// The same, put above the lower bits that `codes` holds.
template <int kBits, int kStride, int kShift>
inline void add_strided(const uint8_t* src, uint8_t* codes) noexcept {
  for (int part = 0; part < 8 / kBits; ++part)
    for (int i = 0; i < kStride; ++i)
      codes[part * kStride + i] = static_cast<uint8_t>(
          codes[part * kStride + i] | (src[i] >> (part * kBits) & ((1 << kBits) - 1)) << kShift);
}

// Bit i of four bytes is the fifth bit of element i.
inline void add_fifth_bits(const uint8_t* src, uint8_t* codes) noexcept {
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (src[i / 8] >> (i % 8) & 1) << 4);
}

// Eight scales and eight minimums of 6 bits in 12 bytes (Q4_K, Q5_K): the first four of each in the low bits
// of bytes 0 .. 3 and 4 .. 7, whose two upper bits are those of the last four; their lower four bits share
// bytes 8 .. 11.
inline void read_six_bit_pairs(const uint8_t* src, uint8_t* scales, uint8_t* mins) noexcept {
  for (int i = 0; i < 4; ++i) {
    scales[i] = src[i] & 0x3f;
    mins[i] = src[4 + i] & 0x3f;
    scales[4 + i] = static_cast<uint8_t>((src[8 + i] & 0x0f) | (src[i] >> 6) << 4);
    mins[4 + i] = static_cast<uint8_t>(src[8 + i] >> 4 | (src[4 + i] >> 6) << 4);
  }
}

// (code - 8) * d
struct Q4_0 {
  static constexpr int kElements = 32, kBytes = 18;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    block.d = read_u16(src);
    read_strided<4, 16>(src + 2, block.codes);
  }
};

// code * d + m
struct Q4_1 {
  static constexpr int kElements = 32, kBytes = 20;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    block.d = read_u16(src);
    block.min = read_u16(src + 2);
    read_strided<4, 16>(src + 4, block.codes);
  }
};

// (code - 16) * d
struct Q5_0 {
  static constexpr int kElements = 32, kBytes = 22;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    block.d = read_u16(src);
    read_strided<4, 16>(src + 6, block.codes);
    add_fifth_bits(src + 2, block.codes);
  }
};

// code * d + m
struct Q5_1 {
  static constexpr int kElements = 32, kBytes = 24;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    block.d = read_u16(src);
    block.min = read_u16(src + 2);
    read_strided<4, 16>(src + 8, block.codes);
    add_fifth_bits(src + 4, block.codes);
  }
};

// int8(code) * d
struct Q8_0 {
  static constexpr int kElements = 32, kBytes = 34;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    block.d = read_u16(src);
    std::memcpy(block.codes, src + 2, kElements);
  }
};

// table[code] * d, see kIq4NlCodes
struct Iq4Nl : Q4_0 {};

// e2m1(code) * 2^(e - 127); e is scales[0].
struct MxFp4 {
  static constexpr int kElements = 32, kBytes = 17;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    block.scales[0] = src[0];
    read_strided<4, 16>(src + 1, block.codes);
  }
};

// code * d * (scales[i] & 15) - dmin * (scales[i] >> 4), i = element / 16
struct Q2_K {
  static constexpr int kElements = 256, kBytes = 84;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    std::memcpy(block.scales, src, 16);
    for (int half = 0; half < 2; ++half) read_strided<2, 32>(src + 16 + 32 * half, block.codes + 128 * half);
    block.d = read_u16(src + 80);
    block.min = read_u16(src + 82);
  }
};

// (code - 4) * d * (scales[i] - 32), i = element / 16
struct Q3_K {
  static constexpr int kElements = 256, kBytes = 110;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    for (int half = 0; half < 2; ++half) read_strided<2, 32>(src + 32 + 32 * half, block.codes + 128 * half);
    add_strided<1, 32, 2>(src, block.codes);
    // Low four bits of scales i and i + 8 in byte i, high two of i, i + 4, i + 8, i + 12 in byte 8 + i.
    read_strided<4, 8>(src + 96, block.scales);
    add_strided<2, 4, 4>(src + 104, block.scales);
    block.d = read_u16(src + 108);
  }
};

// code * d * scales[i] - dmin * mins[i], i = element / 32
struct Q4_K {
  static constexpr int kElements = 256, kBytes = 144;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    block.d = read_u16(src);
    block.min = read_u16(src + 2);
    read_six_bit_pairs(src + 4, block.scales, block.mins);
    for (int quarter = 0; quarter < 4; ++quarter)
      read_strided<4, 32>(src + 16 + 32 * quarter, block.codes + 64 * quarter);
  }
};

// code * d * scales[i] - dmin * mins[i], i = element / 32
struct Q5_K {
  static constexpr int kElements = 256, kBytes = 176;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    block.d = read_u16(src);
    block.min = read_u16(src + 2);
    read_six_bit_pairs(src + 4, block.scales, block.mins);
    for (int quarter = 0; quarter < 4; ++quarter)
      read_strided<4, 32>(src + 48 + 32 * quarter, block.codes + 64 * quarter);
    add_strided<1, 32, 4>(src + 16, block.codes);
  }
};

// (code - 32) * d * int8(scales[i]), i = element / 16
struct Q6_K {
  static constexpr int kElements = 256, kBytes = 210;
  static void read(const uint8_t* src, Block<kElements>& block) noexcept {
    for (int half = 0; half < 2; ++half) {
      read_strided<4, 64>(src + 64 * half, block.codes + 128 * half);
      add_strided<2, 32, 4>(src + 128 + 32 * half, block.codes + 128 * half);
    }
    std::memcpy(block.scales, src + 192, 16);
    block.d = read_u16(src + 208);
  }
};

}  // namespace proa::format::ggml
