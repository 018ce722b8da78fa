#include "ops/attention_plan.h"

#include <algorithm>

#include "ops/kernels.h"

namespace proa::ops {
namespace {

// Fewer rows share the cost of reading and transposing the keys badly.
constexpr int64_t kMinQueryRows = 8;
// Partial results of split items may take this many floats (64 MiB).
constexpr int64_t kMaxPartFloats = int64_t{16} << 20;

// Successive tokens of one sequence.
struct Run {
  int64_t first = 0;
  int64_t end = 0;
};

std::vector<Run> find_runs(const PagedAttention& a) {
  std::vector<Run> runs;
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    if (t == 0 || a.sequence_ids[t] != a.sequence_ids[t - 1]) runs.push_back({t, t});
    runs.back().end = t + 1;
  }
  return runs;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Appends the items of all runs with at most `max_rows` rows each.
void cut_rows(const PagedAttention& a, const std::vector<Run>& runs, int64_t max_rows,
              std::vector<AttentionItem>& items) {
  items.clear();
  const int64_t group_size = a.num_heads / a.num_kv_heads;
  const int64_t heads = std::min(group_size, max_rows);
  const int64_t tokens = std::max<int64_t>(1, max_rows / heads);
  for (const Run& run : runs)
    for (int64_t t = run.first; t < run.end; t += tokens) {
      const int64_t end = std::min(t + tokens, run.end);
      const int64_t num_keys = *std::max_element(a.positions + t, a.positions + end) + int64_t{1};
      for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head)
        for (int64_t h = 0; h < group_size; h += heads) {
          AttentionItem item;
          item.first_token = static_cast<int32_t>(t);
          item.num_tokens = static_cast<int32_t>(end - t);
          item.kv_head = static_cast<int32_t>(kv_head);
          item.first_head = static_cast<int32_t>(kv_head * group_size + h);
          item.num_heads = static_cast<int32_t>(std::min(heads, group_size - h));
          item.end_chunk = static_cast<int32_t>(ceil_div(num_keys, kChunkPositions));
          item.cost = num_keys * item.num_rows() * (a.key_dim + a.value_dim);
          items.push_back(item);
        }
    }
}

// One item per chunk, unless that takes too much memory.
void split_chunks(const PagedAttention& a, AttentionPlan& plan) {
  int64_t parts = 0;
  for (const AttentionItem& item : plan.items) parts += item.end_chunk > 1 ? item.end_chunk : 0;
  if (parts == 0 || parts * kMaxQueryRows * round_up16(a.value_dim) > kMaxPartFloats) return;
  std::vector<AttentionItem> split;
  for (const AttentionItem& item : plan.items) {
    if (item.end_chunk == 1) {
      split.push_back(item);
      continue;
    }
    const auto group = static_cast<int32_t>(plan.groups.size());
    plan.groups.push_back({item, plan.num_parts});
    for (int32_t chunk = 0; chunk < item.end_chunk; ++chunk) {
      AttentionItem part = item;
      part.first_chunk = chunk;
      part.end_chunk = chunk + 1;
      part.group = group;
      part.cost = item.cost / item.end_chunk;
      split.push_back(part);
    }
    plan.num_parts += item.end_chunk;
  }
  plan.items = std::move(split);
}

}  // namespace

AttentionPlan plan_attention(const PagedAttention& a, int num_threads) {
  AttentionPlan plan;
  const std::vector<Run> runs = find_runs(a);
  int64_t rows = kMaxQueryRows;
  cut_rows(a, runs, rows, plan.items);
  const auto items = [&] { return static_cast<int64_t>(plan.items.size()); };
  // Splitting over positions costs a merge; splitting the rows makes each part read all the keys again.
  if (num_threads > 1 && items() < 2 * num_threads) split_chunks(a, plan);
  while (plan.groups.empty() && items() < num_threads && rows > kMinQueryRows) {
    rows /= 2;
    cut_rows(a, runs, rows, plan.items);
  }
  for (const AttentionItem& item : plan.items) {
    plan.cost += item.cost;
    plan.max_rows = std::max(plan.max_rows, item.num_rows());
  }
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const AttentionItem& x, const AttentionItem& y) { return x.cost > y.cost; });
  return plan;
}

}  // namespace proa::ops
