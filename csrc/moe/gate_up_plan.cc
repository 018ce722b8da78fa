#include "moe/gate_up_plan.h"

#include <algorithm>
#include <iterator>

#include "moe/tiles.h"

namespace proa::moe {
namespace {

constexpr int64_t kFewTokensTileRows = 64;
// Blocks are whole tiles of the cells' token loops.
constexpr int64_t kBlockStep = 32;

}  // namespace

int64_t GateUpPlan::cut(std::span<const ExpertGroup> groups, int64_t step, int64_t max_tile_rows) noexcept {
  parts_.clear();
  if (rows_ == 0) return 0;
  int64_t items = 0;
  for (const ExpertGroup& group : groups) {
    const int64_t preferred = group.size() < kManyTokens ? kFewTokensTileRows : kMaxTileRows;
    const int64_t tile_rows = even_tile(rows_, std::min(preferred, max_tile_rows), step);
    const int64_t blocks = ceil_div(group.size(), kMaxBlockTokens);
    const int64_t block_tokens =
        std::min(kMaxBlockTokens, ceil_div(ceil_div(group.size(), blocks), kBlockStep) * kBlockStep);
    parts_.push_back({group, items, tile_rows, block_tokens, blocks});
    items += blocks * ceil_div(rows_, tile_rows);
  }
  return items;
}

void GateUpPlan::assign(std::span<const ExpertGroup> groups, int64_t rows, int64_t step,
                        int64_t num_threads) noexcept {
  rows_ = rows;
  int64_t max_tile_rows = kMaxTileRows;
  num_items_ = cut(groups, step, max_tile_rows);
  while (num_items_ < kItemsPerThread * num_threads && max_tile_rows > step)
    num_items_ = cut(groups, step, max_tile_rows /= 2);
}

GateUpItem GateUpPlan::item(int64_t index) const noexcept {
  const Part& part = *std::prev(std::upper_bound(parts_.begin(), parts_.end(), index,
                                                 [](int64_t i, const Part& p) { return i < p.first_item; }));
  index -= part.first_item;
  const int64_t begin = part.group.begin + index % part.blocks * part.block_tokens;
  const int64_t row = index / part.blocks * part.tile_rows;
  return {part.group, begin, std::min<int64_t>(part.block_tokens, part.group.end - begin), row,
          std::min(part.tile_rows, rows_ - row)};
}

}  // namespace proa::moe
