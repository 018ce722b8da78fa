// Cutting rows into tiles.
#pragma once

#include <algorithm>
#include <cstdint>

namespace proa::moe {

// Work items per thread below which tiles are made smaller.
inline constexpr int64_t kItemsPerThread = 4;

constexpr int64_t ceil_div(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }

// The tile, a multiple of `step`, that cuts `rows` rows into as many equal tiles as those of at most
// `max_rows` rows; `step` when that is larger.
constexpr int64_t even_tile(int64_t rows, int64_t max_rows, int64_t step) noexcept {
  if (rows <= 0) return step;
  const int64_t most = std::max(step, max_rows / step * step);
  return std::min(most, ceil_div(ceil_div(rows, ceil_div(rows, most)), step) * step);
}

// The tile, a multiple of `step` of at most `max_rows` rows, that lets `threads` threads finish `rows` rows
// first when each tile costs as much as `overhead` rows more than it has; `step` when that is larger than
// max_rows.
constexpr int64_t balanced_tile(int64_t rows, int64_t threads, int64_t max_rows, int64_t step,
                                int64_t overhead) noexcept {
  int64_t best = step, least = INT64_MAX;
  for (int64_t tile = step; tile <= max_rows; tile += step) {
    const int64_t turns = ceil_div(ceil_div(rows, tile), threads);
    if (const int64_t cost = turns * (tile + overhead); cost <= least) {
      best = tile;
      least = cost;
    }
  }
  return best;
}

// Kimi K2's 7168 rows: 7 turns of 64, 2 of 224, 2 of 256.
static_assert(balanced_tile(7168, 16, 96, 32, 2) == 64);
static_assert(balanced_tile(7168, 16, 256, 32, 32) == 224);
static_assert(balanced_tile(7168, 15, 256, 32, 32) == 256);
static_assert(balanced_tile(0, 3, 256, 32, 2) == 256);
static_assert(balanced_tile(100, 3, 16, 32, 2) == 32);

}  // namespace proa::moe
