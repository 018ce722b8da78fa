// The routed experts of one layer:
//   out[t] = sum over slots of weight * (down(activation(gate(x[t]) + gate_bias, up(x[t]) + up_bias)) +
//   down_bias)
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "gemm/kernel.h"
#include "moe/expert_weights.h"
#include "moe/expert_workspace.h"
#include "ops/activation.h"

namespace proa::moe {

struct ExpertLayerConfig {
  int64_t num_experts = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  // The kernels' formats are those of the weights; they may differ, and so may the activations they read.
  const gemm::Kernel* gate_up_kernel = nullptr;  // of [intermediate, hidden]
  const gemm::Kernel* down_kernel = nullptr;     // of [hidden, intermediate]
  int64_t max_top_k = 0;
  ops::Activation activation = {};
  bool has_bias = false;    // one of every expert's linears may have one
  bool fine_input = false;  // int8 inputs in two planes, whatever they are (gemm/act_budget.h)
};

// Biases of an expert; nullptr: zeros.
struct ExpertBiases {
  const float* gate = nullptr;  // [intermediate]
  const float* up = nullptr;    // [intermediate]
  const float* down = nullptr;  // [hidden]
};

// A forward is two fork/joins: gate + up + activation, then down with the sum over slots; with many tokens of
// int8 activations one between them quantizes. Threads work on the
// rows that their NUMA node owns. Every result row has the same bits whatever the batch, the order of its
// tokens and the number of threads and nodes.
class ExpertLayer {
 public:
  // Reserves in `workspace`, which must outlive the layer and whose pool does all work. Throws
  // std::bad_alloc.
  ExpertLayer(ExpertWorkspace& workspace, const ExpertLayerConfig& config);

  // gate, up [intermediate, hidden] and down [hidden, intermediate] in the formats of their kernels. Expert
  // may be loaded again. Biases are read when the config has them.
  void load(int64_t expert, const format::RawWeight& gate, const format::RawWeight& up,
            const format::RawWeight& down, const ExpertBiases& biases = {}) noexcept;
  bool is_loaded(int64_t expert) const noexcept {
    return loaded_[static_cast<size_t>(expert)].load(std::memory_order_relaxed) != 0;
  }

  // An expert may leave for another memory and come back as it was: the bytes of its linears are the packed
  // ones, on each node a slice of their rows. No forward that names the expert may be on its way.
  //
  // Takes memory for an expert whose bytes the caller will write, all of weights().gate, up and down.
  void reserve(int64_t expert) noexcept;
  // All bytes are there.
  void commit(int64_t expert) noexcept { set_loaded(expert, true); }
  // Forgets an expert. Its memory is kept for the next one that comes, or given back by release_memory().
  void drop(int64_t expert) noexcept;
  void release_memory() noexcept;
  const ExpertWeights& weights() const noexcept { return weights_; }

  // x, out [num_tokens, hidden]; ids, weights [num_tokens, top_k]. Every id is -1 or a loaded expert;
  // num_tokens <= max_tokens of the workspace and top_k <= max_top_k. One forward at a time in all layers of
  // a workspace: others wait.
  struct Batch {
    const float* x = nullptr;
    const int32_t* ids = nullptr;
    const float* weights = nullptr;
    float* out = nullptr;
    int64_t num_tokens = 0;
    int64_t top_k = 0;
    bool accumulate = false;
  };
  void forward(const Batch& batch) noexcept;

  const ExpertLayerConfig& config() const noexcept { return config_; }
  int64_t weight_bytes() const noexcept { return weights_.bytes(); }
  int64_t max_tokens() const noexcept { return workspace_.max_tokens(); }

  int64_t bytes_per_expert() const noexcept { return weights_.expert_bytes(); }
  // Totals over all forwards, readable from any thread: the bytes of the distinct experts each used, and the
  // time they took, waiting for other layers not included.
  int64_t bytes_read() const noexcept { return bytes_read_.load(std::memory_order_relaxed); }
  int64_t nanoseconds() const noexcept { return nanoseconds_.load(std::memory_order_relaxed); }

 private:
  using Lease = ExpertWorkspace::Lease;
  using NodeCounts = std::array<int64_t, runtime::ThreadPool::kMaxNodes>;

  // Rows [row, row + rows) of a node's slice of down for every pair: [pairs, rows] at `results`.
  struct DownTile {
    int node;
    int64_t row, rows;
    float* results;
  };

  void set_loaded(int64_t expert, bool loaded) noexcept {
    loaded_[static_cast<size_t>(expert)].store(loaded ? 1 : 0, std::memory_order_relaxed);
  }

  float* gate_bias_of(int64_t expert) noexcept {
    return biases_.data() + expert * (2 * config_.intermediate + config_.hidden);
  }
  const float* gate_bias_of(int64_t expert) const noexcept {
    return biases_.data() + expert * (2 * config_.intermediate + config_.hidden);
  }
  const float* up_bias_of(int64_t expert) const noexcept {
    return gate_bias_of(expert) + config_.intermediate;
  }
  const float* down_bias_of(int64_t expert) const noexcept {
    return gate_bias_of(expert) + 2 * config_.intermediate;
  }

  void quantize_row(const gemm::Kernel& kernel, const float* x, int64_t columns, float budget,
                    std::byte* row) const noexcept;
  gemm::ActRows prepare_input(const Lease& scratch, const Batch& batch) const noexcept;
  int64_t first_row(const gemm::Kernel& kernel, const ExpertGroup& group) const noexcept;
  bool is_gathered(const ExpertGroup& group) const noexcept;
  void gather_input(const Lease& scratch, const gemm::ActRows& x) const noexcept;
  void run_gate_up(const Lease& scratch, const gemm::ActRows& x) const noexcept;
  void gate_up_item(const Lease& scratch, int node, const GateUpItem& item, gemm::ActRows x,
                    int thread) const noexcept;
  void quantize_piece(const Lease& scratch, const ExpertGroup& group, int64_t position, const float* product,
                      int64_t row, int64_t rows) const noexcept;
  bool has_many_pairs(const Lease& scratch) const noexcept;
  void quantize_products(const Lease& scratch, const ExpertGroup& group, int64_t begin, int64_t end,
                         int thread) const noexcept;
  void quantize_many(const Lease& scratch) const noexcept;
  void quantize_finished(const Lease& scratch, const GateUpItem& item, int thread) const noexcept;
  int64_t down_tile_rows(int node, int64_t pairs, int64_t experts) const noexcept;
  int64_t down_parts(int node, int64_t pairs, int64_t experts, int64_t tiles) const noexcept;
  void run_down(const Lease& scratch, const Batch& batch) const noexcept;
  void multiply_down(const Lease& scratch, const DownTile& tile, int64_t begin, int64_t end) const noexcept;
  void add_results(const Lease& scratch, const Batch& batch, const DownTile& tile) const noexcept;

  ExpertWorkspace& workspace_;
  ExpertLayerConfig config_;
  int64_t row_step_;  // slices and tiles of the intermediate end at multiples of it
  ExpertWeights weights_;
  int64_t input_row_bytes_ = 0;  // 0: x is read as it is
  // Down's input: as whole rows, or piece by piece.
  bool quantizes_rows_ = false, quantizes_pieces_ = false;
  int64_t intermediate_row_bytes_ = 0;  // of one pair
  ScratchSize scratch_size_;
  std::vector<float> biases_;  // per expert: gate | up | down; empty without biases
  std::vector<std::atomic<uint8_t>> loaded_;
  std::atomic<int64_t> bytes_read_{0}, nanoseconds_{0};
};

}  // namespace proa::moe
