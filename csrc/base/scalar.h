// Scalar conversions of the narrow float formats found in checkpoints and KV caches.
#pragma once

#include <bit>
#include <cstdint>

namespace proa::base {

inline float bf16_to_f32(uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even; a NaN stays a (quiet) NaN.
inline uint16_t f32_to_bf16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// IEEE binary16, subnormals included. Exact.
inline float fp16_to_f32(uint16_t half) noexcept {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero and subnormals: magnitude * 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  const uint32_t exponent_offset = magnitude < 0x7c00u ? 112u << 23 : 224u << 23;
  return std::bit_cast<float>(sign | ((magnitude << 13) + exponent_offset));
}

// OCP fp8 E4M3 ("e4m3fn"): no infinities, 0x7f and 0xff are NaN. Exact.
constexpr float fp8_e4m3_to_f32(uint8_t byte) noexcept {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24;
  const uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 0x08u) {  // zero and subnormals: magnitude * 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// OCP E8M0, the scale of the MX formats: 2^(byte - 127), 255 is NaN. Exact; 0 is a subnormal float.
constexpr float e8m0_to_f32(uint8_t byte) noexcept {
  if (byte == 0xff) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(byte == 0 ? 0x00400000u : static_cast<uint32_t>(byte) << 23);
}

}  // namespace proa::base
