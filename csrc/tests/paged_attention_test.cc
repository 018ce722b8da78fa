// The whole attention operator: plans, threads, chunk splits and merges.
#include "ops/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/topology.h"
#include "ops/attention_plan.h"
#include "ops/kernels.h"
#include "runtime/thread_pool.h"
#include "tests/check.h"

namespace {

using namespace proa::ops;
using proa::runtime::ThreadPool;

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

struct Sequence {
  int32_t past;  // positions in the cache before this call
  int32_t tokens;
};

// A batch with all the arrays it points to. Block tables run backwards through the cache.
struct Batch {
  int64_t heads, kv_heads, key_dim, value_dim, block_size;
  std::vector<float> query, keys, values, out;
  std::vector<int32_t> tables, sequence_ids, positions;
  int64_t max_blocks = 0;

  Batch(const std::vector<Sequence>& sequences, int64_t heads_, int64_t kv_heads_, int64_t key_dim_,
        int64_t value_dim_, int64_t block_size_)
      : heads(heads_),
        kv_heads(kv_heads_),
        key_dim(key_dim_),
        value_dim(value_dim_),
        block_size(block_size_) {
    int64_t num_blocks = 0;
    const auto blocks = [&](const Sequence& s) { return (s.past + s.tokens + block_size - 1) / block_size; };
    for (const Sequence& s : sequences) {
      max_blocks = std::max(max_blocks, blocks(s));
      num_blocks += blocks(s);
    }
    int64_t next = num_blocks;
    for (size_t i = 0; i < sequences.size(); ++i) {
      for (int64_t b = 0; b < max_blocks; ++b)
        tables.push_back(b < blocks(sequences[i]) ? static_cast<int32_t>(--next) : 0);
      for (int32_t t = 0; t < sequences[i].tokens; ++t) {
        sequence_ids.push_back(static_cast<int32_t>(i));
        positions.push_back(sequences[i].past + t);
      }
    }
    query = random_floats(tokens() * heads * key_dim, 1);
    keys = random_floats(num_blocks * block_size * kv_heads * key_dim, 2);
    values = random_floats(num_blocks * block_size * kv_heads * value_dim, 3);
    out.assign(static_cast<size_t>(tokens() * heads * value_dim), NAN);
  }

  int64_t tokens() const { return static_cast<int64_t>(positions.size()); }

  PagedAttention args(int64_t first, int64_t count) {
    return {.num_tokens = count,
            .num_heads = heads,
            .num_kv_heads = kv_heads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .scale = 0.25f,
            .query = query.data() + first * heads * key_dim,
            .query_stride = {heads * key_dim, key_dim},
            .out = out.data() + first * heads * value_dim,
            .out_stride = {heads * value_dim, value_dim},
            .keys = keys.data(),
            .key_stride = {kv_heads * key_dim, key_dim},
            .values = values.data(),
            .value_stride = {kv_heads * value_dim, value_dim},
            .block_tables = tables.data(),
            .max_blocks = max_blocks,
            .block_size = block_size,
            .sequence_ids = sequence_ids.data() + first,
            .positions = positions.data() + first};
  }

  std::vector<float> run(ThreadPool& pool) {
    out.assign(out.size(), NAN);
    paged_attention(pool, args(0, tokens()));
    return out;
  }

  // One call per token.
  std::vector<float> run_alone(ThreadPool& pool) {
    out.assign(out.size(), NAN);
    for (int64_t t = 0; t < tokens(); ++t) paged_attention(pool, args(t, 1));
    return out;
  }

  // Largest |out - exact| over the bound of one output: sums over n keys of products whose scores carry the
  // rounding of key_dim steps.
  double worst_error(const std::vector<float>& result) const;
};

double Batch::worst_error(const std::vector<float>& result) const {
  double worst = 0;
  for (int64_t t = 0; t < tokens(); ++t)
    for (int64_t h = 0; h < heads; ++h) {
      const int32_t n = positions[static_cast<size_t>(t)] + 1;
      const int64_t kv = h / (heads / kv_heads);
      std::vector<double> p(static_cast<size_t>(n)), slots(static_cast<size_t>(n));
      double largest = -1e300, sum = 0, largest_terms = 0;
      for (int32_t i = 0; i < n; ++i) {
        const int64_t block =
            tables[static_cast<size_t>(sequence_ids[static_cast<size_t>(t)] * max_blocks + i / block_size)];
        const int64_t slot = block * block_size + i % block_size;
        slots[static_cast<size_t>(i)] = static_cast<double>(slot);
        double score = 0, terms = 0;
        for (int64_t d = 0; d < key_dim; ++d) {
          const double product =
              static_cast<double>(query[static_cast<size_t>((t * heads + h) * key_dim + d)]) *
              keys[static_cast<size_t>((slot * kv_heads + kv) * key_dim + d)] * 0.25;
          score += product;
          terms += std::fabs(product);
        }
        p[static_cast<size_t>(i)] = score;
        largest = std::max(largest, score);
        largest_terms = std::max(largest_terms, terms);
      }
      for (double& v : p) sum += v = std::exp(v - largest);
      for (int64_t d = 0; d < value_dim; ++d) {
        double exact = 0, magnitude = 0;
        for (int32_t i = 0; i < n; ++i) {
          const double v = values[static_cast<size_t>(
              (static_cast<int64_t>(slots[static_cast<size_t>(i)]) * kv_heads + kv) * value_dim + d)];
          exact += p[static_cast<size_t>(i)] / sum * v;
          magnitude += p[static_cast<size_t>(i)] / sum * std::fabs(v);
        }
        const double steps = 2.0 * (static_cast<double>(key_dim) + 2) * largest_terms + 2.0 * n + 32;
        const double bound = steps * 0x1p-24 * magnitude;
        worst = std::max(
            worst, std::fabs(result[static_cast<size_t>((t * heads + h) * value_dim + d)] - exact) / bound);
      }
    }
  return worst;
}

std::vector<int> cpus(size_t count) {
  const std::vector<int> allowed = proa::cpu::allowed_cpus();
  std::vector<int> chosen;
  for (size_t i = 0; i < count; ++i) chosen.push_back(allowed[i % allowed.size()]);
  return chosen;
}

void check(Batch batch, bool reference) {
  ThreadPool one(cpus(1)), three(cpus(3));
  const std::vector<float> expected = batch.run(one);
  if (reference) CHECK(batch.worst_error(expected) <= 1.0);
  for (float v : expected) CHECK(std::isfinite(v));
  const auto same = [&](const std::vector<float>& other) {
    return std::memcmp(expected.data(), other.data(), expected.size() * sizeof(float)) == 0;
  };
  CHECK(same(batch.run(three)));
  CHECK(same(batch.run_alone(one)));
  CHECK(same(batch.run_alone(three)));
}

void bits_do_not_depend_on_batch_or_threads() {
  check(Batch({{0, 1}}, 1, 1, 8, 8, 4), true);
  check(Batch({{5, 3}, {60, 1}, {0, 70}, {63, 2}}, 6, 2, 16, 16, 16), true);
  check(Batch({{10, 40}}, 8, 8, 20, 12, 7), true);
  check(Batch({{1020, 9}, {2100, 1}}, 4, 2, 16, 16, 16), true);  // over the borders of chunks
  check(Batch({{40, 3}}, 70, 1, 24, 16, 8), true);               // more heads than fit one item
}

void other_tokens_garbage_stays_theirs() {
  Batch batch({{0, 40}}, 3, 1, 16, 16, 8);
  ThreadPool pool(cpus(2));
  const std::vector<float> before = batch.run(pool);
  // Position 39 sits in the last slots of the last block: only the last token may see it.
  const int64_t slot = batch.tables[39 / 8] * int64_t{8} + 39 % 8;
  for (int64_t d = 0; d < 16; ++d) batch.values[static_cast<size_t>(slot * 16 + d)] = INFINITY;
  for (int64_t d = 0; d < 16; ++d) batch.keys[static_cast<size_t>(slot * 16 + d)] = NAN;
  const std::vector<float> after = batch.run(pool);
  CHECK(std::memcmp(before.data(), after.data(), 39 * 3 * 16 * sizeof(float)) == 0);
}

void plans_split_long_decodes() {
  Batch batch({{4000, 1}}, 4, 2, 8, 8, 16);
  const PagedAttention args = batch.args(0, 1);
  const AttentionPlan split = plan_attention(args, 8);
  CHECK_EQ(split.groups.size(), 2u);
  CHECK_EQ(split.items.size(), 8u);
  CHECK_EQ(split.num_parts, 8);
  CHECK(plan_attention(args, 1).groups.empty());
  for (size_t i = 1; i < split.items.size(); ++i) CHECK(split.items[i - 1].cost >= split.items[i].cost);
}

void plans_cover_every_row_once() {
  Batch batch({{3, 17}, {0, 1}, {9, 50}}, 10, 2, 8, 8, 16);
  for (const int threads : {1, 3, 64}) {
    std::vector<int> seen(static_cast<size_t>(batch.tokens() * batch.heads), 0);
    for (const AttentionItem& item : plan_attention(batch.args(0, batch.tokens()), threads).items) {
      CHECK(item.num_rows() <= kMaxQueryRows);
      for (int t = item.first_token; t < item.first_token + item.num_tokens; ++t) {
        CHECK_EQ(batch.sequence_ids[static_cast<size_t>(t)],
                 batch.sequence_ids[static_cast<size_t>(item.first_token)]);
        for (int h = item.first_head; h < item.first_head + item.num_heads; ++h) {
          CHECK_EQ(h / 5, item.kv_head);
          ++seen[static_cast<size_t>(t * batch.heads + h)];
        }
      }
    }
    for (int count : seen) CHECK_EQ(count, 1);
  }
}

}  // namespace

int main() {
  bits_do_not_depend_on_batch_or_threads();
  other_tokens_garbage_stays_theirs();
  plans_split_long_decodes();
  plans_cover_every_row_once();
  return proa::test::result();
}
