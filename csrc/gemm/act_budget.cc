#include "gemm/act_budget.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "gemm/act_format.h"

namespace proa::gemm {
namespace {

// As vectors of the language, which every x86-64 has: the compiler leaves such loops over lanes scalar.
using Lanes = float __attribute__((vector_size(16)));
constexpr int64_t kLanes = 4, kChains = 4;
// Groups whose largest magnitudes are kept, 131072 columns in groups of 32.
constexpr int64_t kMostGroups = 4096;

Lanes load(const float* x) noexcept {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

Lanes larger(Lanes a, Lanes b) noexcept { return a > b ? a : b; }

float largest_of(const Lanes& v) noexcept { return std::max({v[0], v[1], v[2], v[3]}); }

// Sums over a row, in one order whatever the ISA of the cells.
struct RowSums {
  float energy;    // of squares
  float rounding;  // of columns * absmax^2, of all groups
};

RowSums sum_row(const float* x, int64_t in_features, int64_t group, std::span<float> absmax) noexcept {
  Lanes squares[kChains] = {};
  float rounding = 0.0f;
  for (int64_t first = 0; first < in_features; first += group) {
    const int64_t columns = std::min(group, in_features - first);
    Lanes largest[kChains] = {};
    for (int64_t k = first; k < first + columns; k += kChains * kLanes)
      for (int64_t i = 0; i < kChains; ++i) {
        const Lanes value = load(x + k + i * kLanes);
        squares[i] += value * value;
        largest[i] = larger(largest[i], larger(value, -value));
      }
    const float most = largest_of(larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])));
    rounding += most * most * static_cast<float>(columns);
    if (const auto g = static_cast<size_t>(first / group); g < absmax.size()) absmax[g] = most;
  }
  const Lanes sums = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  return {(sums[0] + sums[1]) + (sums[2] + sums[3]), rounding};
}

}  // namespace

float fine_above(const Kernel& kernel, const float* x, int64_t in_features, float budget) noexcept {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  if (!has_planes(kernel.act)) return kNone;
  if (budget == 0.0f) return 0.0f;
  const int64_t group = act_group(kernel.act), groups = (in_features + group - 1) / group;
  float absmax[kMostGroups];
  RowSums row = sum_row(x, in_features, group, absmax);
  // With d = absmax / 127 and uniform errors, `rounding` may be so much.
  const float allowed = 12.0f * 127.0f * 127.0f * budget * budget * row.energy;
  if (!(row.rounding > allowed)) return kNone;
  // Groups below this keep to the budget among themselves, whatever they are.
  const float enough = std::sqrt(allowed / static_cast<float>(in_features));
  if (groups > kMostGroups || format::format_info(kernel.weight).has_minimum) return enough;
  const float last = absmax[groups - 1];
  const int64_t last_columns = in_features - (groups - 1) * group;
  float* end = std::remove_if(absmax, absmax + groups, [&](float most) { return most <= enough; });
  std::make_heap(absmax, end);
  float least = kNone;  // absmax of the groups that get two planes
  while (end > absmax && row.rounding > allowed) {
    std::pop_heap(absmax, end--);
    least = *end;
    row.rounding -= least * least * static_cast<float>(least == last ? last_columns : group);
  }
  return std::nextafter(least, 0.0f);
}

}  // namespace proa::gemm
