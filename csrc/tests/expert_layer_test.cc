// The expert layer against one linear after the other, and its bits under other batches and thread counts.
#include "moe/expert_layer.h"

#include <algorithm>
#include <numeric>

#include "gemm/linear.h"
#include "moe/gate_up_plan.h"
#include "ops/kernels.h"
#include "tests/check.h"
#include "tests/kernel_case.h"
#include "tests/random_weight.h"

namespace {

using namespace proa;
using format::WeightFormat;

constexpr int64_t kExperts = 5, kHidden = 96, kIntermediate = 160, kTopK = 3, kMaxTokens = 170;

struct Formats {
  WeightFormat gate_up, down;
};

constexpr Formats same(WeightFormat weight) { return {weight, weight}; }

struct Fixture {
  runtime::ThreadPool& pool;
  std::vector<gemm::PackedWeight> gate, up, down;
  moe::ExpertLayer layer;

  Fixture(moe::ExpertWorkspace& workspace, Formats formats, uint32_t seed)
      : pool(workspace.pool()), layer(workspace, config(formats)) {
    test::Rng rng(seed);
    const format::Shape in{kIntermediate, kHidden}, out{kHidden, kIntermediate};
    for (int64_t e = 0; e < kExperts; ++e) {
      const auto g = test::random_weight(rng, formats.gate_up, in),
                 u = test::random_weight(rng, formats.gate_up, in),
                 d = test::random_weight(rng, formats.down, out);
      CHECK(!layer.is_loaded(e));
      layer.load(e, g.raw(), u.raw(), d.raw());
      CHECK(layer.is_loaded(e));
      gate.push_back(gemm::pack_weight(pool, *layer.config().gate_up_kernel, g.raw()));
      up.push_back(gemm::pack_weight(pool, *layer.config().gate_up_kernel, u.raw()));
      down.push_back(gemm::pack_weight(pool, *layer.config().down_kernel, d.raw()));
    }
  }

  static moe::ExpertLayerConfig config(Formats formats) {
    const cpu::IsaMask isa = cpu::isa_choice().in_use;
    return {kExperts,
            kHidden,
            kIntermediate,
            gemm::select_kernel(formats.gate_up, {kIntermediate, kHidden}, isa),
            gemm::select_kernel(formats.down, {kHidden, kIntermediate}, isa),
            kTopK};
  }

  std::vector<float> linear(const gemm::PackedWeight& weight, const std::vector<float>& x) {
    std::vector<float> out(static_cast<size_t>(weight.shape.out_features));
    const gemm::LinearJob job{&weight, x.data(), weight.shape.in_features, out.data(),
                              weight.shape.out_features};
    gemm::run_linears(pool, {&job, 1}, 1);
    return out;
  }

  // Its input has a budget of its own.
  static std::vector<float> down_linear(const gemm::PackedWeight& weight, const std::vector<float>& x) {
    const gemm::Kernel& kernel = *weight.kernel;
    const int64_t in = weight.shape.in_features;
    std::vector<std::byte> row(static_cast<size_t>(gemm::act_row_bytes(kernel.act, in)));
    if (kernel.quantize != nullptr)
      kernel.quantize(x.data(), 0, in, in,
                      gemm::fine_above(kernel, x.data(), in, gemm::act_budget(kernel).product), row.data());
    const auto* bytes =
        kernel.quantize == nullptr ? reinterpret_cast<const std::byte*>(x.data()) : row.data();
    std::vector<float> out(static_cast<size_t>(weight.shape.out_features));
    kernel.gemm({weight.bytes.data(),
                 weight.shape,
                 0,
                 weight.shape.panels(),
                 {bytes, 4 * in, nullptr},
                 1,
                 out.data(),
                 weight.shape.out_features});
    return out;
  }

  // One token the slow way: the same steps, so the same bits.
  std::vector<float> expected(const float* x, const int32_t* ids, const float* weights) {
    const std::vector<float> token(x, x + kHidden);
    std::vector<float> sum(kHidden);
    for (int64_t slot = 0; slot < kTopK; ++slot) {
      if (ids[slot] < 0) continue;
      const auto e = static_cast<size_t>(ids[slot]);
      auto product = linear(gate[e], token);
      const auto other = linear(up[e], token);
      ops::op_kernels().activate({}, product.data(), other.data(), kIntermediate, product.data());
      const auto result = down_linear(down[e], product);
      for (size_t r = 0; r < kHidden; ++r) sum[r] += weights[slot] * result[r];
    }
    return sum;
  }

  std::vector<float> forward(const std::vector<float>& x, const std::vector<int32_t>& ids,
                             const std::vector<float>& weights, bool accumulate = false) {
    std::vector<float> out(x.size(), accumulate ? 1.0f : -7.0f);
    layer.forward({x.data(), ids.data(), weights.data(), out.data(), static_cast<int64_t>(x.size()) / kHidden,
                   kTopK, accumulate});
    return out;
  }
};

std::vector<int32_t> random_ids(test::Rng& rng, int64_t tokens) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < tokens * kTopK; ++i)
    ids.push_back(static_cast<int32_t>(test::pick(rng, -1, kExperts - 1)));
  return ids;
}

void matches_linears(Fixture& f, test::Rng& rng) {
  for (int64_t tokens : {int64_t{1}, int64_t{2}, int64_t{20}, kMaxTokens}) {
    const auto x = test::random_floats(rng, tokens * kHidden, 0.1f);
    const auto weights = test::random_floats(rng, tokens * kTopK);
    const auto ids = random_ids(rng, tokens);
    const auto out = f.forward(x, ids, weights);
    const auto added = f.forward(x, ids, weights, true);
    for (int64_t t = 0; t < tokens; ++t) {
      const auto row = f.expected(x.data() + t * kHidden, ids.data() + t * kTopK, weights.data() + t * kTopK);
      bool same = true, same_added = true;
      for (size_t r = 0; r < kHidden; ++r) {
        same = same && out[static_cast<size_t>(t * kHidden) + r] == row[r];
        same_added = same_added && added[static_cast<size_t>(t * kHidden) + r] == 1.0f + row[r];
      }
      CHECK(same);
      CHECK(same_added);
    }
  }
}

// No slot used, one expert for all, and nothing at all.
void edges(Fixture& f, test::Rng& rng) {
  const auto x = test::random_floats(rng, 30 * kHidden, 0.1f);
  const std::vector<float> weights(30 * kTopK, 0.5f);
  for (float value : f.forward(x, std::vector<int32_t>(30 * kTopK, -1), weights)) CHECK_EQ(value, 0.0f);
  const std::vector<int32_t> ids(30 * kTopK, 4);
  const auto out = f.forward(x, ids, weights);
  const auto row = f.expected(x.data() + 29 * kHidden, ids.data(), weights.data());
  CHECK(std::equal(row.begin(), row.end(), out.end() - kHidden));
  CHECK(f.forward({}, {}, {}).empty());
}

void counts_distinct_experts(Fixture& f) {
  const std::vector<float> x(3 * kHidden, 0.1f), weights(3 * kTopK, 1.0f);
  const int64_t bytes = f.layer.bytes_read(), time = f.layer.nanoseconds();
  f.forward(x, {4, 1, 1, -1, 1, 4, 0, 4, -1}, weights);
  CHECK_EQ(f.layer.bytes_read() - bytes, 3 * f.layer.weight_bytes() / kExperts);
  CHECK(f.layer.nanoseconds() > time);
}

// Workers of nodes that share this machine's CPUs, in order or mixed, some nodes with nothing to do.
void nodes_change_no_bits(Formats formats, Fixture& alone) {
  test::Rng rng(6);
  for (const std::vector<int>& nodes :
       {std::vector<int>{0, 0, 0},
        {0, 1, 1},
        {5, 3, 5, 3, 3},
        {0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2},
        {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5}}) {
    runtime::ThreadPool pool(std::vector<int>(nodes.size(), 0), nodes);
    moe::ExpertWorkspace workspace(pool, kMaxTokens);
    Fixture sharded(workspace, formats, 4);
    CHECK_EQ(sharded.layer.bytes_per_expert(), alone.layer.bytes_per_expert());
    for (int64_t tokens : {int64_t{1}, int64_t{7}, kMaxTokens}) {
      const auto x = test::random_floats(rng, tokens * kHidden, 0.1f);
      const auto weights = test::random_floats(rng, tokens * kTopK);
      const auto ids = random_ids(rng, tokens);
      CHECK(sharded.forward(x, ids, weights) == alone.forward(x, ids, weights));
    }
  }
}

// Layers of several shapes in one workspace: it is as large as the largest needs it, and growing it for one
// changes nothing for those before.
void shared_workspace(runtime::ThreadPool& pool) {
  const auto* kernel = gemm::select_kernel(WeightFormat::kF32, {32, 32}, cpu::isa_choice().in_use);
  moe::ExpertWorkspace workspace(pool, kMaxTokens);
  CHECK_EQ(workspace.bytes(), 0);
  Fixture first(workspace, same(WeightFormat::kInt4G32), 4);
  const int64_t small = workspace.bytes();
  test::Rng rng(5);
  const auto x = test::random_floats(rng, kMaxTokens * kHidden, 0.1f);
  const auto weights = test::random_floats(rng, kMaxTokens * kTopK);
  const auto ids = random_ids(rng, kMaxTokens);
  const auto out = first.forward(x, ids, weights);

  const Fixture again(workspace, same(WeightFormat::kInt4G32), 4);
  const moe::ExpertLayer fewer(workspace, {2, kHidden, kIntermediate, kernel, kernel, kTopK - 2});
  CHECK_EQ(workspace.bytes(), small);
  const moe::ExpertLayer larger(workspace,
                                {4 * kExperts, 8 * kHidden, 64 * kIntermediate, kernel, kernel, kTopK});
  const int64_t pairs = kMaxTokens * kTopK;
  const int64_t index = (4 * kExperts + 1) * 4 + 4 * kExperts * (12 + 48) + pairs * 16;
  const int64_t threads = pool.num_threads();
  CHECK(workspace.bytes() > small);
  CHECK(workspace.bytes() <=
        pairs * 4 * 64 * kIntermediate + 4 * pairs * (8 * kHidden + 32 * threads) + index + 256);
  CHECK(first.forward(x, ids, weights) == out);
}

// Every row of every position once, in tiles and blocks within their limits.
void plan_covers_every_group(test::Rng& rng) {
  moe::GateUpPlan plan;
  plan.reserve(40);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<moe::ExpertGroup> groups;
    int32_t end = 0;
    for (int64_t g = test::pick(rng, 1, 6); g > 0; --g) {
      const int32_t begin = end;
      end +=
          static_cast<int32_t>(test::pick(rng, 1, 2) == 1 ? test::pick(rng, 1, 9) : test::pick(rng, 1, 600));
      groups.push_back({static_cast<int32_t>(40 - g), begin, end});
    }
    const int64_t rows = test::pick(rng, 1, 700), step = test::pick(rng, 1, 2) == 1 ? 32 : 128;
    plan.assign(groups, rows, step, test::pick(rng, 1, 40));
    std::vector<int> hits(static_cast<size_t>(end * rows));
    for (int64_t i = 0; i < plan.num_items(); ++i) {
      const moe::GateUpItem item = plan.item(i);
      CHECK(item.tokens >= 1 && item.tokens <= moe::kMaxBlockTokens);
      CHECK(item.rows >= 1 && item.rows <= moe::kMaxTileRows && item.row % step == 0);
      CHECK((item.row + item.rows) % step == 0 || item.row + item.rows == rows);
      CHECK(item.begin >= item.group.begin && item.begin + item.tokens <= item.group.end);
      for (int64_t p = item.begin; p < item.begin + item.tokens; ++p)
        for (int64_t r = item.row; r < item.row + item.rows; ++r) ++hits[static_cast<size_t>(p * rows + r)];
    }
    CHECK(std::all_of(hits.begin(), hits.end(), [](int n) { return n == 1; }));
  }
}

// More tiles of down than threads, cut into parts: results meet in slots that are used again.
void many_tokens_are_those_of_one(WeightFormat weight, std::vector<int> cpus) {
  constexpr int64_t kRows = 608, kWidth = 64, kNum = 6, kTop = 4, kTokens = 64;
  runtime::ThreadPool pool(std::move(cpus));
  moe::ExpertWorkspace workspace(pool, kTokens);
  const format::Shape in{kWidth, kRows}, out{kRows, kWidth};
  const gemm::Kernel* kernel = gemm::select_kernel(weight, in, cpu::isa_choice().in_use);
  moe::ExpertLayer layer(workspace, {kNum, kRows, kWidth, kernel, kernel, kTop});
  test::Rng rng(5);
  for (int64_t e = 0; e < kNum; ++e) {
    const auto gate = test::random_weight(rng, weight, in), up = test::random_weight(rng, weight, in),
               down = test::random_weight(rng, weight, out);
    layer.load(e, gate.raw(), up.raw(), down.raw());
  }
  const auto x = test::random_floats(rng, kTokens * kRows, 0.1f),
             weights = test::random_floats(rng, kTokens * kTop);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kTokens * kTop; ++i)
    ids.push_back(static_cast<int32_t>(test::pick(rng, 0, kNum - 1)));
  std::vector<float> together(x.size()), apart(x.size());
  layer.forward({x.data(), ids.data(), weights.data(), together.data(), kTokens, kTop, false});
  for (int64_t t = 0; t < kTokens; ++t)
    layer.forward({x.data() + t * kRows, ids.data() + t * kTop, weights.data() + t * kTop,
                   apart.data() + t * kRows, 1, kTop, false});
  CHECK(together == apart);
}

}  // namespace

int main() {
  test::Rng plan_rng(1);
  plan_covers_every_group(plan_rng);
  runtime::ThreadPool one({0}), three({0, 0, 0});
  moe::ExpertWorkspace lonely(one, kMaxTokens), crowded(three, kMaxTokens);
  // The last two: only one side reads quantized activations.
  for (const Formats formats :
       {same(WeightFormat::kF32), same(WeightFormat::kBf16), same(WeightFormat::kInt4G32),
        same(WeightFormat::kFp8Block128), same(WeightFormat::kInt8G128),
        Formats{WeightFormat::kInt4G32, WeightFormat::kF32},
        Formats{WeightFormat::kF32, WeightFormat::kInt4G32}}) {
    test::Rng rng(3);
    Fixture alone(lonely, formats, 4), crowd(crowded, formats, 4);
    matches_linears(alone, rng);
    edges(crowd, rng);
    counts_distinct_experts(crowd);
    const auto x = test::random_floats(rng, kMaxTokens * kHidden, 0.1f);
    const auto weights = test::random_floats(rng, kMaxTokens * kTopK);
    const auto ids = random_ids(rng, kMaxTokens);
    CHECK(alone.forward(x, ids, weights) == crowd.forward(x, ids, weights));
    CHECK(alone.layer.weight_bytes() > 0);
    nodes_change_no_bits(formats, alone);
  }
  for (const WeightFormat weight : {WeightFormat::kInt4G32, WeightFormat::kBf16})
    for (const auto& cpus : {std::vector<int>{0}, std::vector<int>{0, 0}, std::vector<int>{0, 1, 0}})
      many_tokens_are_those_of_one(weight, cpus);
  shared_workspace(one);
  shared_workspace(three);
  return test::result();
}
