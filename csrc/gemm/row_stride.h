// How far apart rows of activations stand that tiles read in place.
#pragma once

#include <cstdint>

namespace proa::gemm {

// The least number of 64-byte lines that holds `bytes` and leaves 4 when divided by 8: then pieces of 8, 16
// or 32 lines of 16 or 32 neighbouring rows, from one column on, spread evenly over the 64 sets of an L1
// cache. With an odd number of lines up to 16 of them fall into one set, which has 12 places.
constexpr int64_t spread_row_bytes(int64_t bytes) noexcept {
  const int64_t lines = (bytes + 63) / 64;
  return 64 * (lines + (12 - lines % 8) % 8);
}

}  // namespace proa::gemm
