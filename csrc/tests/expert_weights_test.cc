// Row slices of experts over NUMA nodes, some of which own nothing.
#include "moe/expert_weights.h"

#include <algorithm>

#include "tests/check.h"
#include "tests/random_weight.h"

namespace {

using namespace proa;

// Slices follow each other, cover all rows, end at steps, and follow the weights to within a step.
void slices_share_rows(test::Rng& rng) {
  for (int trial = 0; trial < 500; ++trial) {
    const int64_t rows = test::pick(rng, 1, 8000), step = test::pick(rng, 1, 2) == 1 ? 32 : 128;
    std::vector<int> weights;
    int64_t all = 0;
    for (int64_t n = test::pick(rng, 1, 6); n > 0; --n)
      all += weights.emplace_back(static_cast<int>(test::pick(rng, 1, 24)));
    const auto slices = moe::slice_rows(rows, step, weights);
    CHECK_EQ(slices.size(), weights.size());
    int64_t next = 0;
    for (size_t i = 0; i < slices.size(); ++i) {
      CHECK_EQ(slices[i].first, next);
      CHECK(slices[i].count >= 0);
      next += slices[i].count;
      CHECK(next % step == 0 || next == rows);
      const double share = static_cast<double>(rows) * weights[i] / static_cast<double>(all);
      CHECK(std::abs(static_cast<double>(slices[i].count) - share) <= static_cast<double>(2 * step));
    }
    CHECK_EQ(next, rows);
  }
  const auto three = moe::slice_rows(7168, 32, std::vector<int>{8, 4, 4});
  CHECK_EQ(three[0].count, 3584);
  CHECK_EQ(three[1].count, 1792);
}

// What each node holds is its rows of the whole weight.
void nodes_hold_their_rows(test::Rng& rng, format::WeightFormat gate_up, format::WeightFormat down) {
  constexpr int64_t kHidden = 352, kIntermediate = 288;
  runtime::ThreadPool pool(std::vector<int>(7, 0), {4, 4, 9, 2, 9, 4, 4});
  CHECK_EQ(pool.num_nodes(), 3);
  moe::ExpertWeights weights(pool, {2, kHidden, kIntermediate, gate_up, down}, 32, 32);
  int64_t bytes = 0;
  for (int64_t expert : {1, 0}) {
    const format::Shape in{kIntermediate, kHidden}, out{kHidden, kIntermediate};
    const auto gate = test::random_weight(rng, gate_up, in), up = test::random_weight(rng, gate_up, in),
               raw_down = test::random_weight(rng, down, out);
    const format::RawWeight raw[] = {gate.raw(), up.raw(), raw_down.raw()};
    weights.load(pool, expert, {&raw[0], &raw[1], &raw[2]});
    for (int l = 0; l < 3; ++l) {
      const format::WeightFormat format = l == 2 ? down : gate_up;
      const test::PackedMemory whole(format, l == 0 ? gate : l == 1 ? up : raw_down);
      bytes += static_cast<int64_t>(whole.bytes().size());
      const auto panel_bytes = static_cast<size_t>(format::panel_bytes(format, raw[l].shape.in_features));
      for (int node = 0; node < 3; ++node) {
        const auto part = l == 0   ? weights.gate(node, expert)
                          : l == 1 ? weights.up(node, expert)
                                   : weights.down(node, expert);
        const moe::RowSlice rows = l == 2 ? weights.down_rows(node) : weights.gate_up_rows(node);
        CHECK_EQ(part.shape.out_features, rows.count);
        CHECK_EQ(part.shape.in_features, raw[l].shape.in_features);
        std::vector<float> values(static_cast<size_t>(rows.count * part.shape.in_features)),
            all(static_cast<size_t>(raw[l].shape.out_features * part.shape.in_features));
        format::unpack(format, part.shape,
                       {part.data, static_cast<size_t>(part.shape.panels()) * panel_bytes}, values);
        format::unpack(format, raw[l].shape, whole.bytes(), all);
        CHECK(std::equal(values.begin(), values.end(), all.begin() + rows.first * part.shape.in_features));
      }
    }
  }
  CHECK_EQ(weights.bytes(), bytes);
}

// The memory announced for experts is the memory they get, on every node.
void announces_the_next_slots(test::Rng& rng) {
  constexpr int64_t kHidden = 352, kIntermediate = 288;
  constexpr auto kFormat = format::WeightFormat::kInt4G32;
  runtime::ThreadPool pool(std::vector<int>(3, 0), {4, 4, 9});
  moe::ExpertWeights weights(pool, {5, kHidden, kIntermediate, kFormat, kFormat}, 32, 32);
  const auto gate = test::random_weight(rng, kFormat, {kIntermediate, kHidden}),
             down = test::random_weight(rng, kFormat, {kHidden, kIntermediate});
  const format::RawWeight raw[] = {gate.raw(), gate.raw(), down.raw()};
  weights.load(pool, 2, {&raw[0], &raw[1], &raw[2]});
  const auto announced = weights.next_memory(3);
  CHECK_EQ(announced.size(), 2u);
  CHECK_EQ(weights.next_memory(0).size(), 0u);
  for (int64_t expert : {4, 0, 1}) {
    weights.load(pool, expert, {&raw[0], &raw[1], &raw[2]});
    for (int node = 0; node < 2; ++node) {
      const std::byte* first = weights.gate(node, expert).data;
      CHECK(std::any_of(announced.begin(), announced.end(), [&](std::span<std::byte> range) {
        return first >= range.data() && first < range.data() + range.size();
      }));
    }
  }
}

// Memory that an expert left behind is taken before new memory, until it is released.
void takes_kept_memory_first() {
  constexpr auto kFormat = format::WeightFormat::kInt4G32;
  runtime::ThreadPool pool(std::vector<int>(2, 0), {4, 4});
  moe::ExpertWeights weights(pool, {6, 64, 64, kFormat, kFormat}, 32, 32);
  for (int64_t expert = 0; expert < 5; ++expert) weights.take_slot(expert);
  const std::byte* third = weights.gate(0, 3).data;
  CHECK_EQ(weights.num_spare_slots(), 0);
  weights.free_slot(0);
  weights.release_free_slots();
  weights.free_slot(3);
  CHECK_EQ(weights.num_spare_slots(), 1);
  weights.take_slot(5);
  CHECK(weights.gate(0, 5).data == third);
  CHECK_EQ(weights.num_spare_slots(), 0);
  weights.take_slot(0);
  weights.take_slot(3);
  CHECK_EQ(weights.num_spare_slots(), 0);
  CHECK_EQ(weights.bytes(), 6 * weights.expert_bytes());
}

}  // namespace

int main() {
  test::Rng rng(3);
  slices_share_rows(rng);
  announces_the_next_slots(rng);
  takes_kept_memory_first();
  nodes_hold_their_rows(rng, format::WeightFormat::kInt4G32, format::WeightFormat::kF32);
  nodes_hold_their_rows(rng, format::WeightFormat::kFp8Block128, format::WeightFormat::kBf16);
  return test::result();
}
