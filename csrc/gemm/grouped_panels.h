// Panels of a grouped format side by side, as streams that are read together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/grouped.h"

namespace proa::gemm {

// `stride` bytes apart; the last one has last_lanes rows that are outputs.
struct Panels {
  const std::byte* first;
  int64_t stride;
  int64_t in_features;
  int last_lanes;

  // From byte `at` of a panel to what is read `distance` bytes later, when `count` panels are read together:
  // behind the end of a panel that is the panel `count` further on.
  int64_t ahead(int64_t at, int64_t distance, int64_t count) const noexcept {
    return at + distance < stride ? distance : distance + (count - 1) * stride;
  }
};

// An asm, as gcc takes a function of nothing but prefetches for one without effect.
inline void prefetch_line(const std::byte* line) noexcept { asm volatile("prefetcht0 %0" ::"m"(*line)); }

// Lines of group `i` of a super-block of `groups`, its scales with the last one.
template <class F>
inline void prefetch_group(const std::byte* super, int64_t i, int64_t groups) noexcept {
  using Layout = format::GroupedLayout<F>;
  const std::byte* lines = super + i * Layout::kGroupBytes;
#pragma GCC unroll 8
  for (int line = 0; line < F::kBits; ++line) prefetch_line(lines + 64 * line);
  if (i == groups - 1)
    for (int64_t at = Layout::kGroupBytes; at < Layout::super_bytes(groups) - i * Layout::kGroupBytes;
         at += 64)
      prefetch_line(lines + at);
}

}  // namespace proa::gemm
