#include "moe/route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace proa::moe {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
// Scoring fewer (token, expert) pairs is done by the caller: a fork would take longer.
constexpr int64_t kForkExperts = 2048;
constexpr int64_t kTokensPerItem = 4;

// Softmax over all experts, or a sigmoid of each.
void score_experts(Score score, const float* logits, int64_t n, float* scores) noexcept {
  if (score == Score::kSigmoid) {
    for (int64_t e = 0; e < n; ++e) scores[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    return;
  }
  const float largest = *std::max_element(logits, logits + n);
  float sum = 0.0f;
  for (int64_t e = 0; e < n; ++e) sum += scores[e] = std::exp(logits[e] - largest);
  for (int64_t e = 0; e < n; ++e) scores[e] /= sum;
}

// Whether a comes before b: larger first, NaN last, so that the order is total.
bool before(const float* ranks, int32_t a, int32_t b) noexcept {
  const float x = ranks[a], y = ranks[b];
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) == std::isnan(y) ? a < b : std::isnan(y);
  return x != y ? x > y : a < b;
}

// The k best of `candidates`, best first, to its front.
void take_best(const float* ranks, int64_t k, std::span<int32_t> candidates) noexcept {
  std::partial_sort(candidates.begin(), candidates.begin() + k, candidates.end(),
                    [ranks](int32_t a, int32_t b) { return before(ranks, a, b); });
}

float best_two(const float* ranks, int64_t n) noexcept {
  float first = kMasked, second = kMasked;
  for (int64_t e = 0; e < n; ++e) {
    if (ranks[e] > first) {
      second = first;
      first = ranks[e];
    } else if (ranks[e] > second) {
      second = ranks[e];
    }
  }
  return first + second;
}

// Routes one token after the other, in memory of its own.
class Router {
 public:
  Router(const RouteOptions& options, const float* bias)  // throws std::bad_alloc
      : options_(options),
        bias_(bias),
        scores_(static_cast<size_t>(options.num_experts)),
        ranks_(static_cast<size_t>(options.num_experts)),
        group_ranks_(static_cast<size_t>(options.num_groups)),
        groups_(static_cast<size_t>(options.num_groups)),
        candidates_(static_cast<size_t>(options.num_experts)) {}

  void route_token(const float* logits, int32_t* ids, float* weights) noexcept {
    score_experts(options_.score, logits, options_.num_experts, scores_.data());
    for (int64_t e = 0; e < options_.num_experts; ++e)
      ranks_[e] = scores_[e] + (bias_ == nullptr ? 0.0f : bias_[e]);
    const std::span<int32_t> candidates = collect_candidates();
    take_best(ranks_.data(), options_.top_k, candidates);
    float sum = options_.eps;
    for (int64_t i = 0; i < options_.top_k; ++i) {
      ids[i] = candidates[static_cast<size_t>(i)];
      weights[i] = scores_[static_cast<size_t>(ids[i])];
      sum += weights[i];
    }
    for (int64_t i = 0; i < options_.top_k; ++i)
      weights[i] = (options_.renormalize ? weights[i] / sum : weights[i]) * options_.scale;
  }

 private:
  // The experts of the eligible groups.
  std::span<int32_t> collect_candidates() noexcept {
    const int64_t group_size = options_.num_experts / options_.num_groups;
    std::iota(groups_.begin(), groups_.end(), 0);
    if (options_.top_groups < options_.num_groups) {
      for (int32_t g : groups_)
        group_ranks_[static_cast<size_t>(g)] = best_two(ranks_.data() + g * group_size, group_size);
      take_best(group_ranks_.data(), options_.top_groups, groups_);
    }
    auto end = candidates_.begin();
    for (int64_t i = 0; i < options_.top_groups; ++i, end += group_size)
      std::iota(end, end + group_size, static_cast<int32_t>(groups_[static_cast<size_t>(i)] * group_size));
    return {candidates_.begin(), end};
  }

  const RouteOptions& options_;
  const float* bias_;
  std::vector<float> scores_, ranks_, group_ranks_;
  std::vector<int32_t> groups_, candidates_;
};

}  // namespace

const char* route_error(const RouteOptions& options) noexcept {
  if (options.top_k < 1 || options.top_k > options.num_experts) return "top-k in 1 .. number of experts";
  if (options.num_groups < 1 || options.num_experts % options.num_groups != 0)
    return "num_groups that divides the number of experts";
  if (options.top_groups < 1 || options.top_groups > options.num_groups)
    return "top_groups in 1 .. num_groups";
  const int64_t group_size = options.num_experts / options.num_groups;
  if (options.top_groups * group_size < options.top_k) return "top_groups with room for top-k experts";
  if (options.top_groups < options.num_groups && group_size < 2) return "groups of at least two experts";
  if (!std::isfinite(options.eps) || !std::isfinite(options.scale) || options.eps < 0.0f)
    return "finite eps >= 0 and scale";
  return nullptr;
}

void route(runtime::ThreadPool& pool, const RouteOptions& options, const float* logits, const float* bias,
           int64_t num_tokens, int32_t* ids, float* weights, int64_t* counts) {
  const bool fork = num_tokens * options.num_experts >= kForkExperts;
  std::vector<Router> routers(fork ? static_cast<size_t>(pool.num_threads()) : 1, Router(options, bias));
  const auto route_tokens = [&](int64_t begin, int64_t end, int thread) noexcept {
    for (int64_t t = begin; t < end; ++t)
      routers[static_cast<size_t>(thread)].route_token(logits + t * options.num_experts,
                                                       ids + t * options.top_k, weights + t * options.top_k);
  };
  if (fork)
    pool.parallel_for(num_tokens, kTokensPerItem, route_tokens);
  else
    route_tokens(0, num_tokens, 0);
  if (counts != nullptr)
    for (int64_t i = 0; i < num_tokens * options.top_k; ++i) ++counts[ids[i]];
}

}  // namespace proa::moe
