#include "moe/expert_weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "format/format_info.h"
#include "moe/tiles.h"

namespace proa::moe {
namespace {

using format::kPanelRows;

// Packed by one work item.
constexpr int64_t kPanelsPerItem = 4;
// Pinning and releasing go by pages.
constexpr int64_t kPageBytes = 4096;

std::vector<int> threads_per_node(const runtime::ThreadPool& pool) {
  std::vector<int> threads;
  for (int node = 0; node < pool.num_nodes(); ++node) threads.push_back(pool.threads_of(node));
  return threads;
}

}  // namespace

std::vector<RowSlice> slice_rows(int64_t rows, int64_t step, std::span<const int> weights) {
  const int64_t all = std::accumulate(weights.begin(), weights.end(), int64_t{0});
  const int64_t steps = ceil_div(rows, step);
  std::vector<RowSlice> slices;
  int64_t first = 0, seen = 0;
  for (int weight : weights) {
    seen += weight;
    const int64_t end = std::min(rows, (steps * seen + all / 2) / all * step);
    slices.push_back({first, end - first});
    first = end;
  }
  return slices;
}

ExpertWeights::ExpertWeights(const runtime::ThreadPool& pool, const ExpertShape& shape, int64_t gate_up_step,
                             int64_t down_step)
    : shape_(shape),
      slots_(static_cast<size_t>(shape.num_experts), -1),
      is_used_(static_cast<size_t>(shape.num_experts), 0),
      has_memory_(static_cast<size_t>(shape.num_experts), 0) {
  const std::vector<int> threads = threads_per_node(pool);
  const auto gate_up = slice_rows(shape.intermediate, gate_up_step, threads);
  const auto down = slice_rows(shape.hidden, down_step, threads);
  for (size_t i = 0; i < threads.size(); ++i) {
    Node node;
    node.rows[0] = node.rows[1] = gate_up[i];
    node.rows[2] = down[i];
    for (int l = 0; l < kLinears; ++l) {
      node.offset[l] = node.expert_bytes;
      node.expert_bytes +=
          format::packed_bytes(format(l), {node.rows[l].count, l == 2 ? shape.intermediate : shape.hidden});
    }
    node.slot_bytes = ceil_div(node.expert_bytes, kPageBytes) * kPageBytes;
    const auto bytes = static_cast<size_t>(shape.num_experts * node.slot_bytes);
    node.arena = base::Arena(bytes, threads.size() > 1 ? pool.system_node(static_cast<int>(i)) : -1);
    node.bytes = node.arena.take<std::byte>(bytes);
    expert_bytes_ += node.expert_bytes;
    nodes_.push_back(std::move(node));
  }
}

void ExpertWeights::take_slot(int64_t expert) noexcept {
  int32_t& slot = slots_[static_cast<size_t>(expert)];
  if (slot >= 0) return;
  // Memory that is there may be pinned.
  const auto first_free = [&](uint8_t with_memory) {
    size_t i = 0;
    while (i < is_used_.size() && (is_used_[i] != 0 || has_memory_[i] != with_memory)) ++i;
    return i;
  };
  size_t free = first_free(1);
  if (free == is_used_.size()) free = first_free(0);
  slot = static_cast<int32_t>(free);
  is_used_[free] = has_memory_[free] = 1;
  ++num_used_;
}

void ExpertWeights::free_slot(int64_t expert) noexcept {
  int32_t& slot = slots_[static_cast<size_t>(expert)];
  if (slot < 0) return;
  is_used_[static_cast<size_t>(slot)] = 0;
  slot = -1;
  --num_used_;
}

void ExpertWeights::release_free_slots() noexcept {
  for (const Node& node : nodes_)
    for (size_t i = 0; i < is_used_.size(); ++i)
      if (is_used_[i] == 0 && node.slot_bytes > 0)
        madvise(node.slot(static_cast<int64_t>(i)), static_cast<size_t>(node.slot_bytes), MADV_DONTNEED);
  has_memory_ = is_used_;
}

int64_t ExpertWeights::num_spare_slots() const noexcept {
  return std::count(has_memory_.begin(), has_memory_.end(), 1) - num_used_;
}

std::vector<std::span<std::byte>> ExpertWeights::used_memory() const { return slots_memory(1, num_used_); }

std::vector<std::span<std::byte>> ExpertWeights::next_memory(int64_t count) const {
  return slots_memory(0, count);
}

std::vector<std::span<std::byte>> ExpertWeights::slots_memory(uint8_t is_used, int64_t count) const {
  std::vector<std::span<std::byte>> ranges;
  for (const Node& node : nodes_) {
    const auto slot_bytes = static_cast<size_t>(node.slot_bytes);
    int64_t left = count;
    for (size_t i = 0; i < is_used_.size() && slot_bytes > 0 && left > 0; ++i) {
      if (is_used_[i] != is_used) continue;
      --left;
      std::byte* slot = node.slot(static_cast<int64_t>(i));
      if (!ranges.empty() && ranges.back().data() + ranges.back().size() == slot)
        ranges.back() = {ranges.back().data(), ranges.back().size() + slot_bytes};
      else
        ranges.push_back({slot, slot_bytes});
    }
  }
  return ranges;
}

void ExpertWeights::load(runtime::ThreadPool& pool, int64_t expert,
                         const format::RawWeight* const (&raw)[3]) noexcept {
  take_slot(expert);
  const auto items = [&](int node, int l) {
    return ceil_div(linear(node, expert, l).shape.panels(), kPanelsPerItem);
  };
  std::array<int64_t, runtime::ThreadPool::kMaxNodes> counts;
  for (int node = 0; node < pool.num_nodes(); ++node)
    counts[static_cast<size_t>(node)] = items(node, 0) + items(node, 1) + items(node, 2);
  pool.parallel_for_nodes(counts, [&](int node, int64_t item, int) noexcept {
    int l = 0;
    for (int64_t n; item >= (n = items(node, l)); ++l) item -= n;
    Node& place = nodes_[static_cast<size_t>(node)];
    const int64_t panel_bytes = format::panel_bytes(format(l), raw[l]->shape.in_features);
    std::byte* first = place.slot(slots_[static_cast<size_t>(expert)]) + place.offset[l];
    const int64_t end = std::min((item + 1) * kPanelsPerItem, linear(node, expert, l).shape.panels());
    for (int64_t p = item * kPanelsPerItem; p < end; ++p)
      format::format_info(format(l)).pack_panel(*raw[l], place.rows[l].first / kPanelRows + p,
                                                first + p * panel_bytes);
  });
}

}  // namespace proa::moe
