// Ties, groups, bias, weights and logits that are not numbers.
#include "moe/route.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "tests/check.h"
#include "tests/random_weight.h"

namespace {

using proa::moe::route;
using proa::moe::RouteOptions;
using proa::moe::Score;

proa::runtime::ThreadPool& pool() {
  static proa::runtime::ThreadPool three({0, 0, 0});
  return three;
}

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed run(const RouteOptions& options, const std::vector<float>& logits,
           const std::vector<float>& bias = {}) {
  const auto k = static_cast<size_t>(options.top_k);
  Routed routed{std::vector<int32_t>(k), std::vector<float>(k)};
  CHECK(proa::moe::route_error(options) == nullptr);
  route(pool(), options, logits.data(), bias.empty() ? nullptr : bias.data(), 1, routed.ids.data(),
        routed.weights.data());
  return routed;
}

void ties() {
  const auto routed = run({.num_experts = 6, .top_k = 3}, {1, 2, 2, 0, 2, 2});
  CHECK((routed.ids == std::vector<int32_t>{1, 2, 4}));
  for (float weight : routed.weights) CHECK(std::fabs(weight - 1.0f / 3.0f) <= 3 * 0x1p-24f);
}

void bias_ranks_but_does_not_weigh() {
  const RouteOptions options{
      .num_experts = 4, .top_k = 2, .score = Score::kSigmoid, .renormalize = false, .scale = 2.0f};
  const auto routed = run(options, {0, 0, 0, 5}, {0, 9, 0, 0});
  CHECK((routed.ids == std::vector<int32_t>{1, 3}));
  CHECK_EQ(routed.weights[0], 1.0f);
  CHECK_EQ(routed.weights[1], 2.0f / (1.0f + std::exp(-5.0f)));
}

void groups() {
  // Group 0 holds the best expert, group 1 the best pair: with one group, group 1 wins.
  RouteOptions options{
      .num_experts = 6, .top_k = 2, .score = Score::kSigmoid, .num_groups = 2, .top_groups = 1};
  CHECK((run(options, {3, -9, -9, 2, 2, -9}).ids == std::vector<int32_t>{3, 4}));
  // Biased scores below 0 still beat masked experts.
  CHECK((run(options, {0, 0, 0, 0, 0, 0}, {-3, -3, -3, -2, -2, -2}).ids == std::vector<int32_t>{3, 4}));
  options.top_groups = 2;
  CHECK((run(options, {3, -9, -9, 2, 2, -9}).ids == std::vector<int32_t>{0, 3}));
}

void errors() {
  const RouteOptions good{.num_experts = 8, .top_k = 4, .num_groups = 4, .top_groups = 2};
  const auto bad = [&](auto change) {
    RouteOptions options = good;
    change(options);
    CHECK(proa::moe::route_error(options) != nullptr);
  };
  CHECK(proa::moe::route_error(good) == nullptr);
  bad([](RouteOptions& o) { o.top_k = 0; });
  bad([](RouteOptions& o) { o.top_k = 5; });
  bad([](RouteOptions& o) { o.num_groups = 3; });
  bad([](RouteOptions& o) { o.num_groups = 0; });
  bad([](RouteOptions& o) { o.top_groups = 5; });
  bad([](RouteOptions& o) {
    o.num_groups = 8;
    o.top_groups = 4;
  });
  bad([](RouteOptions& o) { o.eps = -1.0f; });
  bad([](RouteOptions& o) { o.scale = std::numeric_limits<float>::infinity(); });
}

// Ids stay valid and distinct, so that no kernel reads outside its weights.
void not_numbers() {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (Score score : {Score::kSoftmax, Score::kSigmoid})
    for (const std::vector<float>& logits : {std::vector<float>(8, nan),
                                             {nan, 1, nan, 2, inf, -inf, 0, 0},
                                             std::vector<float>(8, inf),
                                             std::vector<float>(8, -inf)}) {
      const auto ids =
          run({.num_experts = 8, .top_k = 4, .score = score, .num_groups = 4, .top_groups = 2}, logits).ids;
      CHECK_EQ(std::set<int32_t>(ids.begin(), ids.end()).size(), size_t{4});
      for (int32_t id : ids) CHECK(id >= 0 && id < 8);
    }
  // What is no number comes last.
  const auto ids =
      run({.num_experts = 8, .top_k = 7, .score = Score::kSigmoid}, {nan, 1, nan, 2, inf, -inf, 0, 0}).ids;
  CHECK(ids == std::vector<int32_t>({4, 3, 1, 6, 7, 5, 0}));
}

// Enough tokens to be spread over the threads.
void tokens_are_independent() {
  constexpr int64_t kTokens = 203, kExperts = 48, kTopK = 5;
  const RouteOptions options{
      .num_experts = kExperts, .top_k = kTopK, .score = Score::kSigmoid, .num_groups = 6, .top_groups = 2};
  proa::test::Rng rng(1);
  const auto logits = proa::test::random_floats(rng, kTokens * kExperts);
  const auto bias = proa::test::random_floats(rng, kExperts);
  std::vector<int32_t> ids(kTokens * kTopK, -1);
  std::vector<float> weights(kTokens * kTopK);
  route(pool(), options, logits.data(), bias.data(), kTokens, ids.data(), weights.data());
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto begin = logits.begin() + t * kExperts;
    const auto alone = run(options, {begin, begin + kExperts}, bias);
    CHECK(std::equal(alone.ids.begin(), alone.ids.end(), ids.begin() + t * kTopK));
    CHECK(std::equal(alone.weights.begin(), alone.weights.end(), weights.begin() + t * kTopK));
  }
}

// Whether few tokens or so many that they are spread over threads.
void tokens_are_counted() {
  constexpr int64_t kExperts = 16, kTopK = 3;
  const RouteOptions options{.num_experts = kExperts, .top_k = kTopK};
  for (int64_t tokens : {1, 400}) {
    std::vector<float> logits(static_cast<size_t>(tokens * kExperts));
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>((i * 7919) % 1009);
    std::vector<int32_t> ids(static_cast<size_t>(tokens * kTopK));
    std::vector<float> weights(ids.size());
    std::vector<int64_t> counts(kExperts, 5), expected(kExperts, 5);
    route(pool(), options, logits.data(), nullptr, tokens, ids.data(), weights.data(), counts.data());
    for (int32_t id : ids) ++expected[static_cast<size_t>(id)];
    CHECK(counts == expected);
  }
}

}  // namespace

int main() {
  ties();
  bias_ranks_but_does_not_weigh();
  groups();
  errors();
  not_numbers();
  tokens_are_independent();
  tokens_are_counted();
  return proa::test::result();
}
