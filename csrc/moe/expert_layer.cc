#include "moe/expert_layer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <iterator>

#include "gemm/act_budget.h"
#include "gemm/act_format.h"
#include "moe/tiles.h"
#include "ops/kernels.h"

namespace proa::moe {
namespace {

// What a tile of down costs beside its rows, in rows: from the rates of tiles of 32 to 256 rows.
constexpr int64_t kFewTokensOverhead = 2;
constexpr int64_t kManyTokensOverhead = 32;
// Results of one down tile per thread, when the largest batch allows.
constexpr int64_t kResultBytes = 8 << 20;
// Quantizing or copying less than this is done by the caller: a fork would take longer.
constexpr int64_t kForkFloats = 64 * 1024;

// Pairs per thread from which a fork to quantize down's input pays.
constexpr int64_t kManyPairs = 16;

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

constexpr int64_t padded(int64_t bytes) noexcept { return ceil_div(bytes, 64) * 64; }

void add(float* sum, const float* row, int64_t n) noexcept {
  for (int64_t r = 0; r < n; ++r) sum[r] += row[r];
}

// sum[r] += weight * row[r], unfused, in every build the same.
void add_scaled(float* sum, const float* row, float weight, int64_t n) noexcept {
  for (int64_t r = 0; r < n; ++r) sum[r] += weight * row[r];
}

using NodeCounts = std::array<int64_t, runtime::ThreadPool::kMaxNodes>;

// out[m * rows + r] = row `row` + r of the linear times x[m].
void multiply(const gemm::Kernel& kernel, const ExpertWeights::Linear& linear, int64_t row, int64_t rows,
              const gemm::ActRows& x, int64_t tokens, float* out) noexcept {
  kernel.gemm({linear.data, linear.shape, row / format::kPanelRows, ceil_div(row + rows, format::kPanelRows),
               x, tokens, out, rows});
}

}  // namespace

ExpertLayer::ExpertLayer(ExpertWorkspace& workspace, const ExpertLayerConfig& config)
    : workspace_(workspace),
      config_(config),
      row_step_(std::max(kTileStep, gemm::act_group(config.down_kernel->act))),
      weights_(workspace.pool(),
               {config.num_experts, config.hidden, config.intermediate, config.gate_up_kernel->weight,
                config.down_kernel->weight},
               row_step_, kTileStep),
      biases_(config.has_bias
                  ? static_cast<size_t>(config.num_experts * (2 * config.intermediate + config.hidden))
                  : 0),
      loaded_(static_cast<size_t>(config.num_experts)) {
  input_row_bytes_ = gemm::act_row_bytes(config.gate_up_kernel->act, config.hidden);
  quantizes_rows_ = gemm::has_planes(config.down_kernel->act);
  quantizes_pieces_ = config.down_kernel->quantize != nullptr && !quantizes_rows_;
  intermediate_row_bytes_ = quantizes_rows_ || quantizes_pieces_
                                ? gemm::act_row_bytes(config.down_kernel->act, config.intermediate)
                                : padded(4 * config.intermediate);
  const int64_t max_pairs = workspace.max_tokens() * config.max_top_k;
  int64_t largest_tile = kTileStep;
  for (int node = 0; node < workspace.pool().num_nodes(); ++node)
    largest_tile = std::max(largest_tile, down_tile_rows(node, max_pairs, 1));
  scratch_size_ = {
      .num_experts = config.num_experts,
      .max_pairs = max_pairs,
      .input_bytes = workspace.max_tokens() * input_row_bytes_,
      .gathered_bytes = gemm::reads_in_place(config.gate_up_kernel->act)
                            ? std::min(max_pairs * input_row_bytes_, kMaxGatheredBytes)
                            : 0,
      .product_bytes = quantizes_rows_ ? max_pairs * config.intermediate * kFloatBytes : 0,
      .intermediate_bytes = max_pairs * intermediate_row_bytes_,
      .results_per_thread = max_pairs * std::clamp(kResultBytes / 4 / max_pairs, kTileStep, largest_tile)};
  workspace.reserve(scratch_size_);
}

void ExpertLayer::load(int64_t expert, const format::RawWeight& gate, const format::RawWeight& up,
                       const format::RawWeight& down, const ExpertBiases& biases) noexcept {
  weights_.load(workspace_.pool(), expert, {&gate, &up, &down});
  if (config_.has_bias) {
    float* dst = gate_bias_of(expert);
    const auto copy = [&](const float* bias, int64_t n) {
      bias == nullptr ? std::fill_n(dst, n, 0.0f) : std::copy_n(bias, n, dst);
      dst += n;
    };
    copy(biases.gate, config_.intermediate);
    copy(biases.up, config_.intermediate);
    copy(biases.down, config_.hidden);
  }
  set_loaded(expert, true);
}

void ExpertLayer::reserve(int64_t expert) noexcept {
  const auto lock = workspace_.exclude();
  weights_.take_slot(expert);
}

void ExpertLayer::drop(int64_t expert) noexcept {
  const auto lock = workspace_.exclude();
  set_loaded(expert, false);
  weights_.free_slot(expert);
}

void ExpertLayer::release_memory() noexcept {
  const auto lock = workspace_.exclude();
  weights_.release_free_slots();
}

void ExpertLayer::forward(const Batch& batch) noexcept {
  if (batch.num_tokens == 0) return;
  const Lease scratch(workspace_, scratch_size_);
  const auto start = std::chrono::steady_clock::now();
  scratch.groups.assign({batch.ids, static_cast<size_t>(batch.num_tokens * batch.top_k)}, batch.top_k,
                        config_.num_experts);
  if (!scratch.groups.active().empty()) {
    const gemm::ActRows x = prepare_input(scratch, batch);
    gather_input(scratch, x);
    run_gate_up(scratch, x);
    if (quantizes_rows_ && has_many_pairs(scratch)) quantize_many(scratch);
  }
  run_down(scratch, batch);
  bytes_read_.fetch_add(static_cast<int64_t>(scratch.groups.active().size()) * weights_.expert_bytes(),
                        std::memory_order_relaxed);
  const auto elapsed = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start);
  nanoseconds_.fetch_add(elapsed.count(), std::memory_order_relaxed);
}

bool ExpertLayer::has_many_pairs(const Lease& scratch) const noexcept {
  return scratch.groups.active().back().end >= kManyPairs * scratch.pool.num_threads();
}

void ExpertLayer::quantize_row(const gemm::Kernel& kernel, const float* x, int64_t columns, float budget,
                               std::byte* row) const noexcept {
  const float fine_above = config_.fine_input ? gemm::kAllFine : gemm::fine_above(kernel, x, columns, budget);
  kernel.quantize(x, 0, columns, columns, fine_above, row);
}

// Each token is quantized once, however many experts read it.
gemm::ActRows ExpertLayer::prepare_input(const Lease& scratch, const Batch& batch) const noexcept {
  const int64_t hidden = config_.hidden;
  if (input_row_bytes_ == 0)
    return {reinterpret_cast<const std::byte*>(batch.x), hidden * kFloatBytes, nullptr};
  const gemm::Kernel& kernel = *config_.gate_up_kernel;
  const float budget = gemm::act_budget(kernel).input;
  const auto quantize = [&](int64_t begin, int64_t end, int) noexcept {
    for (int64_t t = begin; t < end; ++t)
      quantize_row(kernel, batch.x + t * hidden, hidden, budget, scratch.input + t * input_row_bytes_);
  };
  if (batch.num_tokens * hidden < kForkFloats)
    quantize(0, batch.num_tokens, 0);
  else
    scratch.pool.parallel_for(batch.num_tokens, 4, quantize);
  return {scratch.input, input_row_bytes_, nullptr};
}

bool ExpertLayer::is_gathered(const ExpertGroup& group) const noexcept {
  return scratch_size_.gathered_bytes > 0 && group.size() >= kManyTokens &&
         group.end * input_row_bytes_ <= scratch_size_.gathered_bytes;
}

// Copies the rows of the experts that have many tokens to the rows of their positions, where every tile then
// reads them without bringing them together first.
void ExpertLayer::gather_input(const Lease& scratch, const gemm::ActRows& x) const noexcept {
  const std::span<const ExpertGroup> groups = scratch.groups.active();
  const auto is_many = [&](const ExpertGroup& group) { return is_gathered(group); };
  if (std::none_of(groups.begin(), groups.end(), is_many)) return;
  scratch.pool.parallel_for(static_cast<int64_t>(groups.size()), 1, [&](int64_t g, int64_t, int) noexcept {
    const ExpertGroup& group = groups[static_cast<size_t>(g)];
    if (!is_many(group)) return;
    for (int64_t p = group.begin; p < group.end; ++p)
      std::memcpy(scratch.gathered + p * input_row_bytes_, x.row(scratch.groups.tokens()[p]),
                  static_cast<size_t>(input_row_bytes_));
  });
}

void ExpertLayer::run_gate_up(const Lease& scratch, const gemm::ActRows& x) const noexcept {
  NodeCounts items;
  for (int node = 0; node < scratch.pool.num_nodes(); ++node) {
    GateUpPlan& plan = scratch.plans[static_cast<size_t>(node)];
    plan.assign(scratch.groups.active(), weights_.gate_up_rows(node).count, row_step_,
                scratch.pool.threads_of(node));
    items[static_cast<size_t>(node)] = plan.num_items();
  }
  scratch.pool.parallel_for_nodes(items, [&](int node, int64_t item, int) noexcept {
    gate_up_item(scratch, node, scratch.plans[static_cast<size_t>(node)].item(item), x);
  });
}

// The activations of one item, to the rows of its positions.
void ExpertLayer::gate_up_item(const Lease& scratch, int node, const GateUpItem& item,
                               gemm::ActRows x) const noexcept {
  alignas(64) float gate[kMaxBlockTokens * kMaxTileRows];
  alignas(64) float up[kMaxBlockTokens * kMaxTileRows];
  if (is_gathered(item.group))
    x.data = scratch.gathered + item.begin * input_row_bytes_;
  else
    x.index = scratch.groups.tokens() + item.begin;
  const int32_t expert = item.group.expert;
  multiply(*config_.gate_up_kernel, weights_.gate(node, expert), item.row, item.rows, x, item.tokens, gate);
  multiply(*config_.gate_up_kernel, weights_.up(node, expert), item.row, item.rows, x, item.tokens, up);
  const int64_t row = weights_.gate_up_rows(node).first + item.row;
  const ops::OpKernels& kernels = ops::op_kernels();
  for (int64_t m = 0; m < item.tokens; ++m) {
    const int64_t position = item.begin + m;
    std::byte* dst = scratch.intermediate + position * intermediate_row_bytes_;
    float *gate_row = gate + m * item.rows, *up_row = up + m * item.rows;
    float* product = quantizes_pieces_ ? gate_row
                     : quantizes_rows_ ? scratch.products + position * config_.intermediate + row
                                       : reinterpret_cast<float*>(dst) + row;
    if (config_.has_bias) {
      add(gate_row, gate_bias_of(expert) + row, item.rows);
      add(up_row, up_bias_of(expert) + row, item.rows);
    }
    kernels.activate(config_.activation, gate_row, up_row, item.rows, product);
    if (quantizes_pieces_)
      config_.down_kernel->quantize(product, row, item.rows, config_.intermediate, gemm::kAllFine, dst);
  }
  if (quantizes_rows_ && !has_many_pairs(scratch)) quantize_finished(scratch, item);
}

// Down's input of positions [begin, end).
void ExpertLayer::quantize_products(const Lease& scratch, int64_t begin, int64_t end) const noexcept {
  const gemm::Kernel& kernel = *config_.down_kernel;
  const float budget = gemm::act_budget(kernel).product;
  for (int64_t position = begin; position < end; ++position)
    quantize_row(kernel, scratch.products + position * config_.intermediate, config_.intermediate, budget,
                 scratch.intermediate + position * intermediate_row_bytes_);
}

// Whoever adds the last rows of a block of few tokens quantizes it. Blocks are the same on every node.
void ExpertLayer::quantize_finished(const Lease& scratch, const GateUpItem& item) const noexcept {
  std::atomic<int64_t>& done = scratch.rows_done[item.begin];
  if (done.fetch_add(item.rows, std::memory_order_acq_rel) + item.rows < config_.intermediate) return;
  done.store(0, std::memory_order_relaxed);
  quantize_products(scratch, item.begin, item.begin + item.tokens);
}

// Many tokens of an expert would be late if one thread did them all.
void ExpertLayer::quantize_many(const Lease& scratch) const noexcept {
  const int64_t pairs = scratch.groups.active().back().end;
  scratch.pool.parallel_for(
      pairs, 4, [&](int64_t begin, int64_t end, int) noexcept { quantize_products(scratch, begin, end); });
}

// Few tokens: several tiles per thread, so that one that is late can be made up for. Many: every tile reads
// the intermediate of all pairs.
int64_t ExpertLayer::down_tile_rows(int node, int64_t pairs, int64_t experts) const noexcept {
  const int64_t rows = weights_.down_rows(node).count, threads = workspace_.pool().threads_of(node);
  if (pairs >= kManyTokens * experts)
    return balanced_tile(rows, threads, kMaxTileRows, kTileStep, kManyTokensOverhead);
  return balanced_tile(rows, threads, std::min(kMaxTileRows, rows / (kItemsPerThread * threads)), kTileStep,
                       kFewTokensOverhead);
}

void ExpertLayer::run_down(const Lease& scratch, const Batch& batch) const noexcept {
  const std::span<const ExpertGroup> groups = scratch.groups.active();
  const int64_t pairs = groups.empty() ? 1 : groups.back().end;
  const auto experts = std::max<int64_t>(1, std::ssize(groups));
  // As many as there is room for the results of.
  const int64_t room = scratch_size_.results_per_thread / pairs / kTileStep * kTileStep;
  NodeCounts tile_rows, items;
  for (int node = 0; node < scratch.pool.num_nodes(); ++node) {
    const auto i = static_cast<size_t>(node);
    tile_rows[i] = std::min(room, down_tile_rows(node, pairs, experts));
    items[i] = ceil_div(weights_.down_rows(node).count, tile_rows[i]);
  }
  scratch.pool.parallel_for_nodes(items, [&](int node, int64_t item, int thread) noexcept {
    const int64_t tile = tile_rows[static_cast<size_t>(node)], row = item * tile;
    down_item(scratch, batch, node, row, std::min(tile, weights_.down_rows(node).count - row),
              scratch.results + thread * scratch_size_.results_per_thread);
  });
}

// Rows [row, row + rows) of the node's slice of `out`: down for every pair, then each token's sum in the
// order of its slots.
void ExpertLayer::down_item(const Lease& scratch, const Batch& batch, int node, int64_t row, int64_t rows,
                            float* results) const noexcept {
  for (const ExpertGroup& group : scratch.groups.active()) {
    const gemm::ActRows x{scratch.intermediate + group.begin * intermediate_row_bytes_,
                          intermediate_row_bytes_, nullptr};
    multiply(*config_.down_kernel, weights_.down(node, group.expert), row, rows, x, group.size(),
             results + group.begin * rows);
  }
  row += weights_.down_rows(node).first;
  for (int64_t t = 0; t < batch.num_tokens; ++t) {
    float sum[kMaxTileRows] = {};
    for (int64_t pair = t * batch.top_k; pair < (t + 1) * batch.top_k; ++pair)
      if (const int32_t position = scratch.groups.positions()[pair]; position >= 0) {
        float* result = results + position * rows;
        if (config_.has_bias) add(result, down_bias_of(batch.ids[pair]) + row, rows);
        add_scaled(sum, result, batch.weights[pair], rows);
      }
    float* out = batch.out + t * config_.hidden + row;
    for (int64_t r = 0; r < rows; ++r) out[r] = batch.accumulate ? out[r] + sum[r] : sum[r];
  }
}

}  // namespace proa::moe
