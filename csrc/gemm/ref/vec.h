// One float lane in plain C++: the meaning of the vector types of the other ISAs.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "gemm/quantized_act.h"

namespace proa::gemm::ref {

struct Vec {
  float v;

  static Vec set1(float x) { return {x}; }
  static Vec fma(Vec a, Vec b, Vec c) { return {std::fma(a.v, b.v, c.v)}; }
  static Vec add(Vec a, Vec b) { return {a.v + b.v}; }
  static Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
  static Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
  static Vec div(Vec a, Vec b) { return {a.v / b.v}; }
  static Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
  static Vec zero_below(Vec x, Vec limit, Vec value) { return {x.v < limit.v ? 0.0f : value.v}; }
  static Vec power_of_two(Vec t) {
    return {std::bit_cast<float>((std::bit_cast<uint32_t>(t.v) << 23) + 0x3f800000u)};
  }
};

#include "gemm/exp-inl.h"

inline void silu_mul(const float* gate, const float* up, float* out, int64_t n) noexcept {
  for (int64_t i = 0; i < n; ++i) out[i] = vec_silu({gate[i]}).v * up[i];
}

}  // namespace proa::gemm::ref
