// The quantized rows of several tokens, a group at a time, as the loops of grouped cells read them: where
// they are, or brought together so that one address serves all. Both have
//   Group group(int64_t g), and of a Group, for token m and weight scale h of the group:
//   q(m), high(m), fine(m), scale(m), offset(m, h), sum(m, h), rest(m, h)     (quantized_act.h)
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gemm/quantized_act.h"

namespace proa::gemm {

template <class F>
struct TokenRows {
  const QuantizedRow* rows;

  struct Group {
    static constexpr int64_t kHalves = format::GroupedLayout<F>::kHalves;
    const QuantizedRow* rows;
    int64_t g;

    const int8_t* q(int m) const noexcept { return rows[m].q + g * format::kGroup; }
    const int8_t* high(int m) const noexcept { return rows[m].high + g * format::kGroup; }
    bool fine(int m) const noexcept { return rows[m].fine[g] != 0; }
    float scale(int m) const noexcept { return rows[m].scale[g]; }
    int32_t offset(int m, int h) const noexcept { return rows[m].offset[g * kHalves + h]; }
    float sum(int m, int h) const noexcept { return rows[m].sum[g * kHalves + h]; }
    float rest(int m, int h) const noexcept { return rows[m].rest[g * kHalves + h]; }
  };
  Group group(int64_t g) const noexcept { return {rows, g}; }
};

// M tokens side by side; their high planes stay where they are.
template <class F, int M>
struct TokenBlock {
  static_assert(M <= 32);

  struct alignas(64) Entry {
    int8_t q[M][format::kGroup];
    float scale[M];
    uint32_t sums[kActSums<F>][M];
    uint32_t fine;  // bit m
  };

  struct Group {
    static constexpr int kHalves = format::GroupedLayout<F>::kHalves;
    const Entry& entry;
    uint32_t fine_bits;
    const QuantizedRow* rows;
    int64_t g;

    const int8_t* q(int m) const noexcept { return entry.q[m]; }
    const int8_t* high(int m) const noexcept { return rows[m].high + g * format::kGroup; }
    bool fine(int m) const noexcept { return (fine_bits >> m & 1) != 0; }
    float scale(int m) const noexcept { return entry.scale[m]; }
    int32_t offset(int m, int h) const noexcept { return static_cast<int32_t>(entry.sums[h][m]); }
    float sum(int m, int h) const noexcept { return std::bit_cast<float>(entry.sums[h][m]); }
    float rest(int m, int h) const noexcept { return std::bit_cast<float>(entry.sums[kHalves + h][m]); }
  };

  const Entry* entries;  // of each group
  const QuantizedRow* rows;
  Group group(int64_t g) const noexcept { return {entries[g], entries[g].fine, rows, g}; }

  static void copy(const QuantizedRow (&rows)[M], int64_t groups, Entry* entries) noexcept {
    constexpr int64_t kHalves = format::GroupedLayout<F>::kHalves;
    for (int64_t g = 0; g < groups; ++g) {
      Entry& entry = entries[g];
      entry.fine = 0;
      for (int m = 0; m < M; ++m) {
        const QuantizedRow& row = rows[m];
        std::memcpy(entry.q[m], row.q + g * format::kGroup, format::kGroup);
        entry.scale[m] = row.scale[g];
        for (int64_t i = 0; i < kActSums<F>; ++i)  // integers or floats
          std::memcpy(&entry.sums[i][m],
                      i < kHalves ? row.sum + g * kHalves + i : row.rest + g * kHalves + i - kHalves, 4);
        entry.fine |= uint32_t{row.fine[g] != 0} << m;
      }
    }
  }
};

}  // namespace proa::gemm
