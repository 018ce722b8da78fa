// How gate and up of a batch are cut into work items: (expert, token block, row tile), numbered through.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moe/expert_groups.h"

namespace proa::moe {

// Row tiles end at multiples of these: 32 are whole panels, and whole groups of most quantized activations.
inline constexpr int64_t kTileStep = 32;
// Of one item: gate and up of a tile for a block of tokens lie on its thread's stack.
inline constexpr int64_t kMaxTileRows = 256;
inline constexpr int64_t kMaxBlockTokens = 144;
// An expert with as many tokens takes large tiles: each tile reads the activations of all its tokens, which
// then costs more than what small tiles balance better. Measured (benchmarks/LOG.md, "many tokens").
inline constexpr int64_t kManyTokens = 32;
inline bool is_many(const ExpertGroup& group) noexcept { return group.size() >= kManyTokens; }

// Rows [row, row + rows) of the group's expert, for `tokens` of its positions from `begin` on.
struct GateUpItem {
  ExpertGroup group;
  int64_t begin, tokens;
  int64_t row, rows;
};

// Filled once per forward, in memory reserved before. Each expert is cut by its own number of tokens.
class GateUpPlan {
 public:
  // Throws std::bad_alloc.
  void reserve(int64_t num_experts) { parts_.reserve(static_cast<size_t>(num_experts)); }

  // Cuts `rows` rows of every group for that many threads. Tiles end at multiples of `step`, itself one of
  // kTileStep.
  void assign(std::span<const ExpertGroup> groups, int64_t rows, int64_t step, int64_t num_threads) noexcept;

  int64_t num_items() const noexcept { return num_items_; }
  // Token blocks of one tile follow each other, so its weights come from memory once.
  GateUpItem item(int64_t index) const noexcept;
  int64_t bytes() const noexcept { return static_cast<int64_t>(parts_.capacity() * sizeof(Part)); }

 private:
  struct Part {
    ExpertGroup group;
    int64_t first_item;
    int64_t tile_rows;
    int64_t block_tokens, blocks;
  };

  int64_t cut(std::span<const ExpertGroup> groups, int64_t step, int64_t max_tile_rows) noexcept;

  std::vector<Part> parts_;
  int64_t rows_ = 0;
  int64_t num_items_ = 0;
};

}  // namespace proa::moe
