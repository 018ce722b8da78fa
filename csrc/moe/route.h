// From router logits to the experts of each token.
#pragma once

#include <cstdint>

#include "runtime/thread_pool.h"

namespace proa::moe {

enum class Score : uint8_t { kSoftmax, kSigmoid };

// Experts are ranked by score + bias; the weight of a chosen expert is its score without the bias. With
// groups (experts in num_groups equal runs) only the top_groups groups with the largest sum of their two best
// ranks are eligible. A tie goes to the lower index. Rules of transformers' Mixtral, Qwen3-MoE, GLM-4-MoE and
// DeepSeek-V3 routers.
struct RouteOptions {
  int64_t num_experts = 0;
  int64_t top_k = 0;
  Score score = Score::kSoftmax;
  int64_t num_groups = 1;
  int64_t top_groups = 1;
  bool renormalize = true;  // divide the chosen weights by their sum + eps
  float eps = 0.0f;
  float scale = 1.0f;  // factor on the final weights
};

// What is wrong with `options`, or nullptr. Eligible groups must hold top_k experts.
const char* route_error(const RouteOptions& options) noexcept;

// logits [num_tokens, E], bias [E] or nullptr -> ids and weights [num_tokens, top_k], best rank first.
// Always valid, distinct ids, whatever the logits. counts [E] or nullptr: += the tokens each expert got.
// Throws std::bad_alloc.
void route(runtime::ThreadPool& pool, const RouteOptions& options, const float* logits, const float* bias,
           int64_t num_tokens, int32_t* ids, float* weights, int64_t* counts = nullptr);

}  // namespace proa::moe
