// Scratch memory of expert layers that run one after another on one pool.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "base/arena.h"
#include "moe/expert_groups.h"
#include "moe/gate_up_plan.h"
#include "runtime/thread_pool.h"

namespace proa::moe {

// What the largest batch of one layer takes.
struct ScratchSize {
  int64_t num_experts = 0;
  int64_t max_pairs = 0;           // (token, slot)
  int64_t input_bytes = 0;         // quantized x [max_tokens]; 0 when x is read as it is
  int64_t gathered_bytes = 0;      // quantized x of pairs; 0 when cells bring rows together themselves
  int64_t product_bytes = 0;       // floats [max_pairs, intermediate]; 0 unless rows are quantized as a whole
  int64_t intermediate_bytes = 0;  // of all pairs
  int64_t rows_per_thread = 0;     // bytes: of rows before they are packed
  int64_t results_per_thread = 0;  // floats

  int64_t bytes(int num_threads) const noexcept;
};

// Room for the results of one tile of down that several threads multiply a part of: whoever adds the last
// part sums them up, then the room is free for the next tile.
class alignas(64) ResultSlot {
 public:
  void reset() noexcept {
    parts_.store(0, std::memory_order_relaxed);
    tiles_.store(0, std::memory_order_relaxed);
  }
  // Until `tiles` tiles have left: soon, as their parts were handed out before.
  void await(int64_t tiles) const noexcept {
    while (tiles_.load(std::memory_order_acquire) < tiles) std::this_thread::yield();
  }
  // Whether this was the last of `parts` parts.
  bool add_part(int64_t parts) noexcept {
    return parts_.fetch_add(1, std::memory_order_acq_rel) + 1 == parts;
  }
  void release() noexcept {
    parts_.store(0, std::memory_order_relaxed);
    tiles_.fetch_add(1, std::memory_order_release);
  }

 private:
  std::atomic<int64_t> parts_{0}, tiles_{0};
};

// Of quantized x in the order of experts; experts whose pairs come later read it in the order of tokens.
inline constexpr int64_t kMaxGatheredBytes = int64_t{256} << 20;

// One block, as large as the largest layer needs it, cut anew for the layer that runs. Layers reserve when
// they are built; a forward allocates nothing. With n threads, P = max_tokens * max_top_k, R = P, for cells
// that read blocks of rows (AMX) P + 15 * min(P, experts), and B bytes per activation (2.4 for int8
// activations, 2 for bf16 tiles, and 4 for floats, where x takes nothing) a layer needs at most
//   B * max_tokens * hidden + B * R * intermediate                               x and the intermediate
//   + 4 P * intermediate + 16 n B * intermediate                      int8 only: its floats; AMX: n blocks
//   + max(128 n P, min(8 MiB * n, 4 P * min(256 n, hidden + 32 n)))   results of down tiles
//   + min(256 MiB, B * R * hidden)                                    int8 and bf16 tiles: gathered x
// bytes. Pages that no batch reaches take no memory.
class ExpertWorkspace {
 public:
  // `pool` must outlive the workspace. No batch may have more than max_tokens tokens.
  ExpertWorkspace(runtime::ThreadPool& pool, int64_t max_tokens)
      : pool_(pool),
        max_tokens_(max_tokens),
        plans_(static_cast<size_t>(pool.num_nodes())),
        result_slots_(std::make_unique<ResultSlot[]>(static_cast<size_t>(pool.num_threads()))) {}
  ExpertWorkspace(const ExpertWorkspace&) = delete;
  ExpertWorkspace& operator=(const ExpertWorkspace&) = delete;

  // Makes room for batches of `size`; waits for a forward that runs. Throws std::bad_alloc.
  void reserve(const ScratchSize& size);

  // Has the system give all of it now, so that no batch finds none. Where there are several NUMA nodes pages
  // are left to those who compute with them. Waits for a forward that runs.
  void touch() noexcept;

  // The workspace of one forward: others wait until it is destroyed. `size` must have been reserved.
  class Lease {
   public:
    Lease(ExpertWorkspace& workspace, const ScratchSize& size) noexcept;

    runtime::ThreadPool& pool;
    ExpertGroups& groups;
    std::span<GateUpPlan> plans;  // of each node
    std::byte* input;
    std::byte* gathered;
    float* products;  // row p: of the pair at position p: what down multiplies, before it is quantized
    std::byte* intermediate;
    std::byte* rows;  // [num_threads, rows_per_thread]
    // Of the positions where token blocks begin: rows of the intermediate that are there. 0 between forwards.
    std::atomic<int64_t>* rows_done;
    float* results;            // [num_threads, results_per_thread]
    ResultSlot* result_slots;  // [num_threads]

   private:
    std::lock_guard<std::mutex> lock_;
  };

  // Waits for a forward that runs and keeps others from starting.
  std::unique_lock<std::mutex> exclude() noexcept { return std::unique_lock(busy_); }

  runtime::ThreadPool& pool() const noexcept { return pool_; }
  int64_t max_tokens() const noexcept { return max_tokens_; }
  // Address space; resident after touch(), else page by page as batches reach them.
  int64_t bytes() const noexcept;

 private:
  runtime::ThreadPool& pool_;
  int64_t max_tokens_;
  mutable std::mutex busy_;
  base::Arena arena_;
  std::span<std::byte> block_;
  ExpertGroups groups_;
  std::vector<GateUpPlan> plans_;
  std::unique_ptr<std::atomic<int64_t>[]> rows_done_;
  std::unique_ptr<ResultSlot[]> result_slots_;
  int64_t max_pairs_ = 0;
};

}  // namespace proa::moe
