#include "gemm/act_budget.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "gemm/act_format.h"

namespace proa::gemm {
namespace {

constexpr float kPerColumn = 12.0f * 127.0f * 127.0f * kActError * kActError;  // c^2
// As vectors of the language, which every x86-64 has: the compiler leaves such loops over lanes scalar.
using Lanes = float __attribute__((vector_size(16)));
constexpr int64_t kLanes = 4, kChains = 4;

Lanes load(const float* x) noexcept {
  Lanes lanes;
  std::memcpy(&lanes, x, sizeof lanes);
  return lanes;
}

Lanes larger(Lanes a, Lanes b) noexcept { return a > b ? a : b; }

float largest_of(const Lanes& v) noexcept { return std::max({v[0], v[1], v[2], v[3]}); }

}  // namespace

// Compiled once, so summed in one order whatever the ISA of the cells.
float fine_above(ActFormat act, const float* x, int64_t in_features) noexcept {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  if (!has_planes(act)) return kNone;
  const int64_t group = act_group(act);
  Lanes squares[kChains] = {};
  float rounding = 0.0f;  // sum of n * absmax^2
  for (int64_t first = 0; first < in_features; first += group) {
    const int64_t columns = std::min(group, in_features - first);
    Lanes largest[kChains] = {};
    for (int64_t k = first; k < first + columns; k += kChains * kLanes)
      for (int64_t i = 0; i < kChains; ++i) {
        const Lanes value = load(x + k + i * kLanes);
        squares[i] += value * value;
        largest[i] = larger(largest[i], larger(value, -value));
      }
    const float absmax = largest_of(larger(larger(largest[0], largest[1]), larger(largest[2], largest[3])));
    rounding += absmax * absmax * static_cast<float>(columns);
  }
  const Lanes sums = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  const float energy = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  if (!(rounding > kPerColumn * energy)) return kNone;
  return std::sqrt(kPerColumn * energy / static_cast<float>(in_features));
}

}  // namespace proa::gemm
