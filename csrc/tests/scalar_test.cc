#include "base/scalar.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tests/check.h"

namespace {

using namespace proa::base;

// Value of a binary float with the given field widths, from its definition.
double value_of(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1u << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

void bf16_round_trips() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = bf16_to_f32(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      CHECK(std::isnan(bf16_to_f32(f32_to_bf16(value))));
    } else {
      CHECK_EQ(f32_to_bf16(value), bits);
    }
  }
}

void bf16_rounds_to_nearest_even() {
  CHECK_EQ(f32_to_bf16(std::bit_cast<float>(0x3f808000u)), 0x3f80);  // a tie goes to the even neighbour
  CHECK_EQ(f32_to_bf16(std::bit_cast<float>(0x3f818000u)), 0x3f82);
  CHECK_EQ(f32_to_bf16(std::bit_cast<float>(0x3f808001u)), 0x3f81);
  CHECK_EQ(f32_to_bf16(std::bit_cast<float>(0x3f807fffu)), 0x3f80);
  CHECK_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);           // overflows to infinity
  CHECK_EQ(f32_to_bf16(std::bit_cast<float>(0x7f800001u)) & 0x7fc0, 0x7fc0);  // a NaN is no infinity
}

void fp16_is_exact() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = fp16_to_f32(static_cast<uint16_t>(bits));
    if ((bits & 0x7c00) == 0x7c00) {
      CHECK_EQ(std::isnan(value), (bits & 0x3ff) != 0);
      CHECK_EQ(std::isinf(value), (bits & 0x3ff) == 0);
      CHECK_EQ(std::signbit(value), (bits & 0x8000) != 0);
    } else {
      CHECK_EQ(static_cast<double>(value), value_of(bits, 5, 10));
    }
  }
  CHECK(std::signbit(fp16_to_f32(0x8000)));
}

void fp8_is_exact() {
  for (uint32_t bits = 0; bits < 0x100; ++bits) {
    const float value = fp8_e4m3_to_f32(static_cast<uint8_t>(bits));
    if ((bits & 0x7f) == 0x7f) {
      CHECK(std::isnan(value));
    } else {
      CHECK_EQ(static_cast<double>(value), value_of(bits, 4, 3));
    }
  }
  CHECK_EQ(fp8_e4m3_to_f32(0x7e), 448.0f);
}

void e8m0_is_exact() {
  for (int byte = 0; byte < 255; ++byte)
    CHECK_EQ(static_cast<double>(e8m0_to_f32(static_cast<uint8_t>(byte))), std::ldexp(1.0, byte - 127));
  CHECK(std::isnan(e8m0_to_f32(255)));
}

}  // namespace

int main() {
  bf16_round_trips();
  bf16_rounds_to_nearest_even();
  fp16_is_exact();
  fp8_is_exact();
  e8m0_is_exact();
  return proa::test::result();
}
