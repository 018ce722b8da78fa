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

}  // namespace proa::moe
