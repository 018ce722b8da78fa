// The gated activations of MLPs and experts: what joins the outputs of gate and up.
#pragma once

#include <cstdint>
#include <limits>

namespace proa::ops {

enum class Gating : uint8_t {
  kSilu,       // g * sigmoid(g) * u
  kSwigluOai,  // g * sigmoid(alpha * g) * (u + 1): gpt-oss, MiniMax-M3
};

// First g = min(gate, limit) and u = max(-limit, min(up, limit)), as in DeepSeek-V4 (`swiglu_limit`) and
// gpt-oss; an infinite limit changes nothing. NaN stays NaN.
struct Activation {
  Gating gating = Gating::kSilu;
  float limit = std::numeric_limits<float>::infinity();
  float alpha = 1.0f;
};

}  // namespace proa::ops
