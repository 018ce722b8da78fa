// The (token, slot) pairs of a batch, sorted by expert.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gemm/kernel.h"

namespace proa::moe {

// Positions [begin, end) of the sorted pairs belong to `expert`.
struct ExpertGroup {
  static constexpr int64_t kBlockRows = gemm::ActRows::kBlockRows;

  int32_t expert;
  int32_t begin;
  int32_t end;
  // When the positions of every expert are cut into blocks of kBlockRows, the last of which may be smaller.
  int32_t first_block = 0;

  int64_t num_blocks() const noexcept { return (size() + kBlockRows - 1) / kBlockRows; }

  int64_t size() const noexcept { return end - begin; }
};

// Filled once per forward, in memory reserved before.
class ExpertGroups {
 public:
  // Makes room for ids below num_experts and for max_pairs pairs. Throws std::bad_alloc.
  void reserve(int64_t num_experts, int64_t max_pairs);

  // ids [num_tokens, top_k]: -1 skips the slot, all others must be < num_experts. Tokens stay in order within
  // a group.
  void assign(std::span<const int32_t> ids, int64_t top_k, int64_t num_experts) noexcept;

  std::span<const ExpertGroup> active() const noexcept { return active_; }
  // The token of each position.
  const int32_t* tokens() const noexcept { return tokens_.data(); }
  // The position of pair token * top_k + slot; -1 where the slot is skipped.
  const int32_t* positions() const noexcept { return positions_.data(); }
  int64_t bytes() const noexcept;

 private:
  std::vector<int32_t> starts_;  // [num_experts + 1] of the layer with the most experts
  std::vector<ExpertGroup> active_;
  std::vector<int32_t> tokens_, positions_;
};

}  // namespace proa::moe
