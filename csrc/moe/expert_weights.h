// The packed weights of a layer's experts, in memory of the NUMA nodes that compute with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/arena.h"
#include "format/weight_format.h"
#include "runtime/thread_pool.h"

namespace proa::moe {

// Rows [first, first + count).
struct RowSlice {
  int64_t first = 0;
  int64_t count = 0;
};

// Cuts `rows` rows in proportion to `weights`, which are not all zero. Slices end at multiples of `step` and
// may be empty.
std::vector<RowSlice> slice_rows(int64_t rows, int64_t step, std::span<const int> weights);

struct ExpertShape {
  int64_t num_experts = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  format::WeightFormat gate_up{};
  format::WeightFormat down{};
};

// An expert in memory has a slot, the same on every node. Of the free ones those that have memory are taken
// first, from the lowest on; those that were never used or were released have none.
//
// Each node of the pool owns a slice of the rows of every gate and up [intermediate, hidden] and one of every
// down [hidden, intermediate], as large as its share of the threads. As panels stand for themselves, a slice
// is a packed linear of its own.
class ExpertWeights {
 public:
  // Slices of gate and up end at multiples of `gate_up_step`, those of down at multiples of `down_step`.
  // Throws std::bad_alloc.
  ExpertWeights(const runtime::ThreadPool& pool, const ExpertShape& shape, int64_t gate_up_step,
                int64_t down_step);

  bool has_slot(int64_t expert) const noexcept { return slots_[static_cast<size_t>(expert)] >= 0; }
  // Unless it has one.
  void take_slot(int64_t expert) noexcept;
  // Its bytes stay where they are until the slot is taken again or released.
  void free_slot(int64_t expert) noexcept;
  // Gives the memory of free slots back to the system; it must not be pinned.
  void release_free_slots() noexcept;

  // A slice of one linear. The expert has a slot.
  struct Linear {
    const std::byte* data;
    format::Shape shape;  // of the slice
  };
  Linear gate(int node, int64_t expert) const noexcept { return linear(node, expert, 0); }
  Linear up(int node, int64_t expert) const noexcept { return linear(node, expert, 1); }
  Linear down(int node, int64_t expert) const noexcept { return linear(node, expert, 2); }
  const RowSlice& gate_up_rows(int node) const noexcept { return nodes_[static_cast<size_t>(node)].rows[0]; }
  const RowSlice& down_rows(int node) const noexcept { return nodes_[static_cast<size_t>(node)].rows[2]; }

  // Takes a slot and packs gate, up and down, in that order, on the threads of the nodes they go to. `pool`
  // is that of the constructor.
  void load(runtime::ThreadPool& pool, int64_t expert, const format::RawWeight* const (&raw)[3]) noexcept;

  int64_t expert_bytes() const noexcept { return expert_bytes_; }
  // Of the experts that have a slot.
  int64_t bytes() const noexcept { return expert_bytes_ * num_used_; }

  // Whole pages with the slots that are taken, as few ranges as cover no others.
  std::vector<std::span<std::byte>> used_memory() const;
  // Experts that could come without new memory.
  int64_t num_spare_slots() const noexcept;
  // Whole pages that the next `count` experts without a slot will take, all of one node after those of
  // another.
  std::vector<std::span<std::byte>> next_memory(int64_t count) const;

 private:
  static constexpr int kLinears = 3;  // gate | up | down of an expert follow each other

  struct Node {
    base::Arena arena;
    std::span<std::byte> bytes;
    int64_t expert_bytes = 0;
    int64_t slot_bytes = 0;  // whole pages
    RowSlice rows[kLinears];
    int64_t offset[kLinears] = {};  // within an expert

    std::byte* slot(int64_t i) const noexcept { return bytes.data() + i * slot_bytes; }
  };

  Linear linear(int node, int64_t expert, int i) const noexcept {
    const Node& n = nodes_[static_cast<size_t>(node)];
    return {n.slot(slots_[static_cast<size_t>(expert)]) + n.offset[i],
            {n.rows[i].count, i == 2 ? shape_.intermediate : shape_.hidden}};
  }
  // Of the lowest `count` slots that are used or not.
  std::vector<std::span<std::byte>> slots_memory(uint8_t is_used, int64_t count) const;
  format::WeightFormat format(int i) const noexcept { return i == 2 ? shape_.down : shape_.gate_up; }

  ExpertShape shape_;
  int64_t expert_bytes_ = 0;
  int64_t num_used_ = 0;
  std::vector<int32_t> slots_;       // of each expert; -1: none
  std::vector<uint8_t> is_used_;     // of each slot
  std::vector<uint8_t> has_memory_;  // of each slot
  std::vector<Node> nodes_;
};

}  // namespace proa::moe
