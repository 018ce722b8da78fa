#include "moe/expert_groups.h"

#include <algorithm>

namespace proa::moe {

void ExpertGroups::reserve(int64_t num_experts, int64_t max_pairs) {
  const auto experts = static_cast<size_t>(num_experts), pairs = static_cast<size_t>(max_pairs);
  starts_.resize(std::max(starts_.size(), experts + 1));
  active_.reserve(experts);
  tokens_.resize(std::max(tokens_.size(), pairs));
  positions_.resize(std::max(positions_.size(), pairs));
}

int64_t ExpertGroups::bytes() const noexcept {
  return static_cast<int64_t>((starts_.size() + tokens_.size() + positions_.size()) * sizeof(int32_t) +
                              active_.capacity() * sizeof(ExpertGroup));
}

void ExpertGroups::assign(std::span<const int32_t> ids, int64_t top_k, int64_t num_experts) noexcept {
  std::fill(starts_.begin(), starts_.begin() + num_experts + 1, 0);
  for (int32_t id : ids)
    if (id >= 0) ++starts_[static_cast<size_t>(id) + 1];
  active_.clear();
  int32_t blocks = 0;
  for (size_t e = 0; e < static_cast<size_t>(num_experts); ++e) {
    const int32_t count = starts_[e + 1];
    starts_[e + 1] += starts_[e];
    if (count == 0) continue;
    active_.push_back({static_cast<int32_t>(e), starts_[e], starts_[e + 1], blocks});
    blocks += static_cast<int32_t>(active_.back().num_blocks());
  }
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    positions_[pair] = -1;
    if (ids[pair] < 0) continue;
    const int32_t position = starts_[static_cast<size_t>(ids[pair])]++;
    positions_[pair] = position;
    tokens_[static_cast<size_t>(position)] = static_cast<int32_t>(static_cast<int64_t>(pair) / top_k);
  }
}

}  // namespace proa::moe
