#include "ops/paged_attention.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "base/arena.h"
#include "ops/attention_plan.h"
#include "ops/kernels.h"

namespace proa::ops {
namespace {

// Below this many multiply-adds waking the other threads costs more than it saves.
constexpr int64_t kMinParallelCost = 1 << 18;

// Memory of the calling thread that stays from call to call, so that decode does not pay for page faults.
std::span<float> reusable_floats(int64_t count) {
  thread_local base::Arena arena;
  thread_local std::span<float> floats;
  if (static_cast<int64_t>(floats.size()) < count) {
    floats = {};
    arena = base::Arena();  // the old block goes before the new one comes
    arena = base::Arena(static_cast<size_t>(count) * sizeof(float));
    floats = arena.take<float>(static_cast<size_t>(count));
  }
  return floats;
}

// Results of some rows before the division by the sum: states [rows], values [rows][round_up16(value_dim)].
struct Partial {
  SoftmaxState* states;
  float* values;
};

// Cuts the reusable memory: per thread kernel scratch and two partials, then one partial per part of a split
// item.
class Memory {
 public:
  Memory(const PagedAttention& a, const AttentionPlan& plan, int num_threads)
      : partial_floats_(2 * round_up16(plan.max_rows) + plan.max_rows * round_up16(a.value_dim)),
        states_floats_(2 * round_up16(plan.max_rows)),
        scratch_floats_(round_up16(attention_scratch_floats(plan.max_rows, a.key_dim))),
        thread_floats_(scratch_floats_ + 2 * partial_floats_),
        parts_offset_(num_threads * thread_floats_),
        floats_(reusable_floats(parts_offset_ + plan.num_parts * partial_floats_)) {}

  float* scratch(int thread) const { return floats_.data() + thread * thread_floats_; }
  Partial partial(int thread, int which) const {
    return at(thread * thread_floats_ + scratch_floats_ + which * partial_floats_);
  }
  Partial part(int64_t index) const { return at(parts_offset_ + index * partial_floats_); }

 private:
  Partial at(int64_t offset) const {
    float* start = floats_.data() + offset;
    return {reinterpret_cast<SoftmaxState*>(start), start + states_floats_};
  }

  int64_t partial_floats_, states_floats_, scratch_floats_, thread_floats_, parts_offset_;
  std::span<float> floats_;
};

// The rows of an item as the kernels want them.
struct ItemRows {
  std::array<const float*, kMaxQueryRows> query;
  std::array<int32_t, kMaxQueryRows> num_keys;
  AttentionRows rows;

  ItemRows(const PagedAttention& a, const AttentionItem& item) {
    int r = 0;
    for (int t = item.first_token; t < item.first_token + item.num_tokens; ++t)
      for (int h = item.first_head; h < item.first_head + item.num_heads; ++h, ++r) {
        query[static_cast<size_t>(r)] = a.query + t * a.query_stride[0] + h * a.query_stride[1];
        num_keys[static_cast<size_t>(r)] = a.positions[t] + 1;
      }
    rows = {.num_rows = r, .query = query.data(), .num_keys = num_keys.data(), .scale = a.scale};
  }
};

template <class T>
AttentionCache<T> cache_of(const PagedAttention& a, const AttentionItem& item) {
  return {.keys = static_cast<const T*>(a.keys) + item.kv_head * a.key_stride[1],
          .values = static_cast<const T*>(a.values) + item.kv_head * a.value_stride[1],
          .key_stride = a.key_stride[0],
          .value_stride = a.value_stride[0],
          .block_table = a.block_tables + a.sequence_ids[item.first_token] * a.max_blocks,
          .block_size = a.block_size,
          .key_dim = a.key_dim,
          .value_dim = a.value_dim};
}

class Attention {
 public:
  Attention(const PagedAttention& a, const AttentionPlan& plan, const Memory& memory)
      : a_(a), plan_(plan), memory_(memory), stride_(round_up16(a.value_dim)) {}

  void run_item(const AttentionItem& item, int thread) const noexcept {
    const ItemRows rows(a_, item);
    if (item.group >= 0) {
      const int64_t part = plan_.groups[static_cast<size_t>(item.group)].first_part + item.first_chunk;
      attend(rows, item, item.first_chunk, thread, memory_.part(part));
      return;
    }
    const Partial total = memory_.partial(thread, 0), next = memory_.partial(thread, 1);
    attend(rows, item, 0, thread, total);
    for (int32_t chunk = 1; chunk < item.end_chunk; ++chunk) {
      attend(rows, item, chunk, thread, next);
      for (int r = 0; r < rows.rows.num_rows; ++r) merge_row(rows, r, chunk, total, next);
    }
    for (int r = 0; r < rows.rows.num_rows; ++r) finish_row(item, r, total);
  }

  void merge_group_row(const SplitGroup& group, int row) const noexcept {
    if (row >= group.rows.num_rows()) return;
    const ItemRows rows(a_, group.rows);
    const Partial total = memory_.part(group.first_part);
    for (int32_t chunk = 1; chunk < group.rows.end_chunk; ++chunk)
      merge_row(rows, row, chunk, total, memory_.part(group.first_part + chunk));
    finish_row(group.rows, row, total);
  }

 private:
  void attend(const ItemRows& rows, const AttentionItem& item, int32_t chunk, int thread,
              const Partial& to) const noexcept {
    const int64_t first = chunk * kChunkPositions;
    if (a_.bf16)
      kernels_.attend_bf16(rows.rows, cache_of<uint16_t>(a_, item), first, memory_.scratch(thread), to.states,
                           to.values);
    else
      kernels_.attend_f32(rows.rows, cache_of<float>(a_, item), first, memory_.scratch(thread), to.states,
                          to.values);
  }

  // Chunks are merged in order; those a row does not reach hold nothing of it.
  void merge_row(const ItemRows& rows, int r, int32_t chunk, const Partial& total,
                 const Partial& next) const noexcept {
    if (rows.rows.num_keys[r] <= chunk * kChunkPositions) return;
    kernels_.merge(total.states[r], total.values + r * stride_, next.states[r], next.values + r * stride_,
                   a_.value_dim);
  }

  void finish_row(const AttentionItem& item, int r, const Partial& total) const noexcept {
    const int64_t token = item.first_token + r / item.num_heads;
    const int64_t head = item.first_head + r % item.num_heads;
    kernels_.finish(total.states[r], total.values + r * stride_, a_.value_dim,
                    a_.out + token * a_.out_stride[0] + head * a_.out_stride[1]);
  }

  const PagedAttention& a_;
  const AttentionPlan& plan_;
  const Memory& memory_;
  const OpKernels& kernels_ = op_kernels();
  int64_t stride_;
};

}  // namespace

void paged_attention(runtime::ThreadPool& pool, const PagedAttention& a) {
  if (a.num_tokens == 0) return;
  const AttentionPlan plan = plan_attention(a, pool.num_threads());
  const bool alone = plan.cost < kMinParallelCost;
  const Memory memory(a, plan, alone ? 1 : pool.num_threads());
  const Attention attention(a, plan, memory);
  const auto num_items = static_cast<int64_t>(plan.items.size());
  const auto num_merges = static_cast<int64_t>(plan.groups.size()) * plan.max_rows;
  const auto run_items = [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) attention.run_item(plan.items[static_cast<size_t>(i)], thread);
  };
  const auto run_merges = [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i)
      attention.merge_group_row(plan.groups[static_cast<size_t>(i / plan.max_rows)],
                                static_cast<int>(i % plan.max_rows));
  };
  if (alone) {
    run_items(0, num_items, 0);
    run_merges(0, num_merges, 0);
    return;
  }
  pool.parallel_for(num_items, 1, run_items);
  if (num_merges > 0) pool.parallel_for(num_merges, 4, run_merges);
}

}  // namespace proa::ops
