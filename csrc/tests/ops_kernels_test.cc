// The per-ISA kernels against exact values and against each other, bit for bit.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/scalar.h"
#include "cpu/isa.h"
#include "ops/kernels.h"
#include "tests/check.h"

namespace {

using namespace proa::ops;

std::vector<const OpKernels*> runnable() {
  const proa::cpu::IsaMask detected = proa::cpu::isa_choice().detected;
  const auto has = [&](proa::cpu::IsaMask tier) { return (detected & tier) == tier; };
  std::vector<const OpKernels*> tables = {&ref::kKernels};
  if (has(proa::cpu::kAvx2Tier)) tables.push_back(&avx2::kKernels);
  if (has(proa::cpu::kAvx512Tier)) tables.push_back(&avx512::kKernels);
  return tables;
}

std::vector<float> random_floats(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// |y - e^x| in units of the last place of the float nearest to e^x.
double ulps(float y, float x) {
  const double exact = std::exp(static_cast<double>(x));
  const float nearest = static_cast<float>(exact);
  const float ulp = std::nextafter(nearest, std::numeric_limits<float>::infinity()) - nearest;
  return std::fabs(y - exact) / ulp;
}

void exp_is_within_two_ulps() {
  std::vector<float> x;
  for (float v = -86.499f; v <= 88.72f; v += 0.000731f) x.push_back(v);
  for (float v = 1e-30f; v < 1.0f; v *= 1.7f) {
    x.push_back(v);
    x.push_back(-v);
  }
  x.resize((x.size() + 15) / 16 * 16, 0.0f);
  std::vector<float> expected;
  for (const OpKernels* kernels : runnable()) {
    std::vector<float> y(x.size());
    kernels->exp_row(x.data(), static_cast<int64_t>(x.size()), y.data());
    double worst = 0;
    for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], x[i]));
    CHECK(worst <= 2.0);
    if (expected.empty()) expected = y;
    CHECK(same_bits(y, expected));
  }
}

void exp_handles_the_ends() {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> x(16, 0.0f), y(16);
  x[0] = -infinity;
  x[1] = -1e30f;
  x[2] = -86.51f;
  x[3] = std::numeric_limits<float>::quiet_NaN();
  x[5] = 88.73f;
  x[6] = 89.0f;
  for (const OpKernels* kernels : runnable()) {
    kernels->exp_row(x.data(), 16, y.data());
    CHECK_EQ(y[0], 0.0f);
    CHECK_EQ(y[1], 0.0f);
    CHECK_EQ(y[2], 0.0f);
    CHECK(std::isnan(y[3]));
    CHECK_EQ(y[4], 1.0f);
    for (size_t i = 5; i < 7; ++i) CHECK_EQ(y[i], infinity);
  }
}

void norms_agree_and_stay_in_bounds() {
  for (const int64_t size : {1, 2, 15, 16, 17, 63, 64, 65, 100, 576}) {
    const auto n = static_cast<size_t>(size);
    const std::vector<float> x = random_floats(n, 1), delta = random_floats(n, 2),
                             weight = random_floats(n, 3);
    double squares = 0;
    for (float v : x) squares += static_cast<double>(v) * v;
    const double factor = 1 / std::sqrt(squares / static_cast<double>(size) + 1e-5);
    std::vector<float> first_norm, first_sum;
    for (const OpKernels* kernels : runnable()) {
      std::vector<float> out(n + 1, 42.0f);  // one more to see a write past the end
      kernels->rms_norm(x.data(), weight.data(), 1e-5f, size, out.data());
      CHECK_EQ(out[n], 42.0f);
      // Every step rounds once: at most size / 64 + 8 of them in the sum (halved by the root), four after it.
      const double bound = (static_cast<double>(size) / 64 + 16) * 0x1p-24;
      for (size_t i = 0; i < n; ++i)
        CHECK(std::fabs(out[i] - x[i] * factor * weight[i]) <= bound * std::fabs(x[i] * factor * weight[i]));
      std::vector<float> sum = x;
      std::vector<float> sum_norm(n);
      kernels->add_rms_norm(sum.data(), delta.data(), weight.data(), 1e-5f, size, sum_norm.data());
      for (size_t i = 0; i < n; ++i) CHECK_EQ(sum[i], x[i] + delta[i]);
      std::vector<float> again(n);
      kernels->rms_norm(sum.data(), weight.data(), 1e-5f, size, again.data());
      CHECK(same_bits(again, sum_norm));
      if (first_norm.empty()) first_norm = out, first_sum = sum_norm;
      CHECK(same_bits(out, first_norm));
      CHECK(same_bits(sum_norm, first_sum));
    }
  }
}

struct AttentionCase {
  int rows;
  int64_t key_dim, value_dim, block_size;
  std::vector<int32_t> num_keys;  // one per row
};

// Values and sums of one chunk, in buffers of exactly the documented size.
template <class T>
std::vector<float> attend(const OpKernels& kernels, const AttentionCase& c, const std::vector<float>& queries,
                          const std::vector<T>& keys, const std::vector<T>& values,
                          const std::vector<int32_t>& blocks) {
  std::vector<const float*> query;
  for (int r = 0; r < c.rows; ++r) query.push_back(queries.data() + r * c.key_dim);
  const AttentionRows rows{
      .num_rows = c.rows, .query = query.data(), .num_keys = c.num_keys.data(), .scale = 0.3f};
  const AttentionCache<T> cache{.keys = keys.data(),
                                .values = values.data(),
                                .key_stride = c.key_dim,
                                .value_stride = c.value_dim,
                                .block_table = blocks.data(),
                                .block_size = c.block_size,
                                .key_dim = c.key_dim,
                                .value_dim = c.value_dim};
  std::vector<float> scratch(static_cast<size_t>(attention_scratch_floats(c.rows, c.key_dim)));
  std::vector<SoftmaxState> states(static_cast<size_t>(c.rows));
  const int64_t stride = round_up16(c.value_dim);
  std::vector<float> sums(static_cast<size_t>(c.rows * stride));
  if constexpr (sizeof(T) == sizeof(float))
    kernels.attend_f32(rows, cache, 0, scratch.data(), states.data(), sums.data());
  else
    kernels.attend_bf16(rows, cache, 0, scratch.data(), states.data(), sums.data());
  std::vector<float> out(static_cast<size_t>(c.rows * c.value_dim));
  for (int r = 0; r < c.rows; ++r)
    kernels.finish(states[static_cast<size_t>(r)], sums.data() + r * stride, c.value_dim,
                   out.data() + r * c.value_dim);
  return out;
}

template <class T>
std::vector<T> narrow(const std::vector<float>& values) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return values;
  } else {
    std::vector<T> narrowed;
    for (float v : values) narrowed.push_back(proa::base::f32_to_bf16(v));
    return narrowed;
  }
}

template <class T>
void attention_agrees(const AttentionCase& c) {
  const auto slots =
      static_cast<size_t>((*std::max_element(c.num_keys.begin(), c.num_keys.end()) + c.block_size - 1) /
                          c.block_size * c.block_size);
  std::vector<int32_t> blocks;
  for (size_t b = slots / static_cast<size_t>(c.block_size); b-- > 0;)
    blocks.push_back(static_cast<int32_t>(b));
  const auto queries = random_floats(static_cast<size_t>(c.rows * c.key_dim), 4);
  const auto keys = narrow<T>(random_floats(slots * static_cast<size_t>(c.key_dim), 5));
  const auto values = narrow<T>(random_floats(slots * static_cast<size_t>(c.value_dim), 6));
  std::vector<float> first;
  for (const OpKernels* kernels : runnable()) {
    const std::vector<float> out = attend<T>(*kernels, c, queries, keys, values, blocks);
    for (float v : out) CHECK(std::isfinite(v));
    if (first.empty()) first = out;
    CHECK(same_bits(out, first));
  }
  // A row alone has the bits it has in the group.
  for (int r = 0; r < c.rows; ++r) {
    AttentionCase alone = c;
    alone.rows = 1;
    alone.num_keys = {c.num_keys[static_cast<size_t>(r)]};
    const std::vector<float> query(queries.begin() + r * c.key_dim, queries.begin() + (r + 1) * c.key_dim);
    const std::vector<float> out = attend<T>(*runnable().back(), alone, query, keys, values, blocks);
    const std::vector<float> expected(first.begin() + r * c.value_dim, first.begin() + (r + 1) * c.value_dim);
    CHECK(same_bits(out, expected));
  }
}

void attention_agrees_on_odd_shapes() {
  attention_agrees<float>({1, 1, 1, 1, {1}});
  attention_agrees<float>({3, 64, 64, 16, {70, 71, 72}});
  attention_agrees<float>({7, 80, 80, 16, {64, 65, 1, 130, 128, 15, 17}});
  attention_agrees<float>({13, 33, 19, 5, {9, 9, 9, 10, 10, 10, 11, 11, 11, 12, 12, 12, 13}});
  attention_agrees<float>({2, 576, 512, 16, {100, 3}});
  attention_agrees<uint16_t>({6, 64, 64, 16, {70, 71, 72, 73, 74, 75}});
  attention_agrees<uint16_t>({5, 33, 19, 3, {33, 34, 35, 36, 37}});
}

void merging_matches_a_double_computation() {
  for (const OpKernels* kernels : runnable()) {
    std::vector<float> a = random_floats(16, 7);
    const std::vector<float> b = random_floats(16, 8), before = a;
    SoftmaxState state{1.5f, 2.0f};
    kernels->merge(state, a.data(), {3.25f, 4.0f}, b.data(), 16);
    const double mine = std::exp(1.5 - 3.25);
    CHECK_EQ(state.max, 3.25f);
    CHECK(std::fabs(state.sum - (2 * mine + 4)) < 1e-5);
    for (size_t i = 0; i < 16; ++i)
      CHECK(std::fabs(a[i] - (before[i] * mine + b[i])) <=
            0x1p-22 * (std::fabs(before[i]) + std::fabs(b[i])));
  }
}

// Against double, with the clamps of both kinds; the same bits in every ISA, odd lengths included.
void activations_agree() {
  std::vector<float> gate, up;
  for (float x = -110.0f; x < 110.0f; x += 0.0137f) gate.push_back(x);
  gate.insert(gate.end(), {0.0f, -0.0f, 1e-30f, -1e-30f, 3e38f, -3e38f});
  for (size_t i = 0; i < gate.size(); ++i) up.push_back(gate[i * 7 % gate.size()] * 0.25f);
  const auto n = static_cast<int64_t>(gate.size());
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Activation& act :
       {Activation{}, Activation{Gating::kSilu, 10.0f, 1.0f}, Activation{Gating::kSwigluOai, 7.0f, 1.702f},
        Activation{Gating::kSwigluOai, infinity, 1.702f}}) {
    std::vector<float> expected(gate.size()), out(gate.size());
    ref::kKernels.activate(act, gate.data(), up.data(), n, expected.data());
    for (size_t i = 0; i < gate.size(); ++i) {
      const double g = std::min(gate[i], act.limit), u = std::clamp(up[i], -act.limit, act.limit);
      const bool oai = act.gating == Gating::kSwigluOai;
      const double exact = g / (1.0 + std::exp(-(oai ? double{act.alpha} : 1.0) * g)) * (oai ? u + 1.0 : u);
      // exp to 2 ulp, its argument to half an ulp of at most 88, then four roundings; u + 1 may cancel. Below
      // the normal range of 1 / exp the result is 0.
      const double bound = (0x1p-24 * (88.0 * oai + 8.0)) * std::fabs(exact) +
                           0x1p-24 * oai * std::fabs(g) / (1.0 + std::exp(-act.alpha * g)) + 0x1p-110;
      if (std::fabs(exact) < std::numeric_limits<float>::max())
        CHECK(std::fabs(expected[i] - exact) <= bound);
    }
    for (const OpKernels* kernels : runnable()) {
      for (size_t first : {0, 1, 7, 15}) {
        kernels->activate(act, gate.data() + first, up.data() + first, n - static_cast<int64_t>(first),
                          out.data());
        CHECK(std::memcmp(out.data(), expected.data() + first, (gate.size() - first) * sizeof(float)) == 0);
      }
      const float nan = std::numeric_limits<float>::quiet_NaN(), one = 1.0f;
      kernels->activate(act, &nan, &one, 1, out.data());
      kernels->activate(act, &one, &nan, 1, out.data() + 1);
      CHECK(std::isnan(out[0]) && std::isnan(out[1]));
    }
  }
}

}  // namespace

int main() {
  activations_agree();
  exp_is_within_two_ulps();
  exp_handles_the_ends();
  norms_agree_and_stay_in_bounds();
  attention_agrees_on_odd_shapes();
  merging_matches_a_double_computation();
  return proa::test::result();
}
