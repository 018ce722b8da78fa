#include "moe/expert_layer.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "gemm/act_budget.h"
#include "gemm/act_format.h"
#include "moe/rows.h"
#include "moe/tiles.h"
#include "ops/kernels.h"

namespace proa::moe {
namespace {

// Results of one down tile per thread, when the largest batch allows.
constexpr int64_t kResultBytes = 8 << 20;
// Quantizing or copying less than this is done by the caller: a fork would take longer.
constexpr int64_t kForkFloats = 64 * 1024;

// Pairs per thread from which a fork to quantize down's input pays.
constexpr int64_t kManyPairs = 16;

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

constexpr int64_t padded(int64_t bytes) noexcept { return ceil_div(bytes, 64) * 64; }

// Rows of activations that the positions of `pairs` pairs take in blocks, those of each expert by themselves.
constexpr int64_t block_rows(int64_t pairs, int64_t experts) noexcept {
  return pairs + (ExpertGroup::kBlockRows - 1) * std::min(pairs, experts);
}

// f(group, begin, end, thread) for all blocks of positions.
template <class F>
void for_each_block(const ExpertWorkspace::Lease& scratch, F&& f) noexcept {
  const std::span<const ExpertGroup> groups = scratch.groups.active();
  const int64_t blocks = groups.back().first_block + groups.back().num_blocks();
  scratch.pool.parallel_for(blocks, 1, [&](int64_t block, int64_t, int thread) noexcept {
    const ExpertGroup& group =
        *std::prev(std::upper_bound(groups.begin(), groups.end(), block,
                                    [](int64_t i, const ExpertGroup& g) { return i < g.first_block; }));
    const int64_t begin = group.begin + (block - group.first_block) * ExpertGroup::kBlockRows;
    f(group, begin, std::min<int64_t>(group.end, begin + ExpertGroup::kBlockRows), thread);
  });
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
  const auto max_rows = [&](const gemm::Kernel& kernel) {
    return kernel.pack == nullptr ? max_pairs : block_rows(max_pairs, config.num_experts);
  };
  int64_t largest_tile = kTileStep;
  for (int node = 0; node < workspace.pool().num_nodes(); ++node)
    largest_tile = std::max(largest_tile, down_tile_rows(node, max_pairs, 1));
  scratch_size_ = {
      .num_experts = config.num_experts,
      .max_pairs = max_pairs,
      .input_bytes = workspace.max_tokens() * input_row_bytes_,
      .gathered_bytes = gemm::reads_in_place(config.gate_up_kernel->act)
                            ? std::min(max_rows(*config.gate_up_kernel) * input_row_bytes_, kMaxGatheredBytes)
                            : 0,
      .product_bytes = quantizes_rows_ ? max_pairs * config.intermediate * kFloatBytes : 0,
      .intermediate_bytes = max_rows(*config.down_kernel) * intermediate_row_bytes_,
      .rows_per_thread = quantizes_rows_ && config.down_kernel->pack != nullptr
                             ? ExpertGroup::kBlockRows * intermediate_row_bytes_
                             : 0,
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

// Of the rows of activations of a group, for cells that read blocks of them: these begin at multiples of
// kBlockRows.
int64_t ExpertLayer::first_row(const gemm::Kernel& kernel, const ExpertGroup& group) const noexcept {
  return kernel.pack == nullptr ? group.begin : group.first_block * ExpertGroup::kBlockRows;
}

bool ExpertLayer::is_gathered(const ExpertGroup& group) const noexcept {
  const int64_t end =
      first_row(*config_.gate_up_kernel, group) + ExpertGroup::kBlockRows * group.num_blocks();
  return scratch_size_.gathered_bytes > 0 && is_many(group) &&
         end * input_row_bytes_ <= scratch_size_.gathered_bytes;
}

// Brings the rows of the experts that have many tokens together, where every tile then reads them as they
// are.
void ExpertLayer::gather_input(const Lease& scratch, const gemm::ActRows& x) const noexcept {
  const std::span<const ExpertGroup> groups = scratch.groups.active();
  if (std::none_of(groups.begin(), groups.end(),
                   [&](const ExpertGroup& group) { return is_gathered(group); }))
    return;
  const gemm::Kernel& kernel = *config_.gate_up_kernel;
  for_each_block(scratch, [&](const ExpertGroup& group, int64_t begin, int64_t end, int) noexcept {
    if (!is_gathered(group)) return;
    const std::byte* rows[ExpertGroup::kBlockRows];
    for (int64_t p = begin; p < end; ++p) rows[p - begin] = x.row(scratch.groups.tokens()[p]);
    std::byte* dst = scratch.gathered + (first_row(kernel, group) + begin - group.begin) * input_row_bytes_;
    if (kernel.pack != nullptr) return kernel.pack(rows, end - begin, config_.hidden, dst);
    for (int64_t p = begin; p < end; ++p, dst += input_row_bytes_)
      std::memcpy(dst, rows[p - begin], static_cast<size_t>(input_row_bytes_));
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
  scratch.pool.parallel_for_nodes(items, [&](int node, int64_t item, int thread) noexcept {
    gate_up_item(scratch, node, scratch.plans[static_cast<size_t>(node)].item(item), x, thread);
  });
}

// The activations of one item, to the rows of its positions.
void ExpertLayer::gate_up_item(const Lease& scratch, int node, const GateUpItem& item, gemm::ActRows x,
                               int thread) const noexcept {
  alignas(64) float gate[kMaxBlockTokens * kMaxTileRows];
  alignas(64) float up[kMaxBlockTokens * kMaxTileRows];
  if (is_gathered(item.group)) {
    const int64_t first = first_row(*config_.gate_up_kernel, item.group);
    x.data = scratch.gathered + (first + item.begin - item.group.begin) * input_row_bytes_;
    x.tiled = config_.gate_up_kernel->pack != nullptr;
  } else {
    x.index = scratch.groups.tokens() + item.begin;
  }
  const int32_t expert = item.group.expert;
  multiply_rows(*config_.gate_up_kernel, weights_.gate(node, expert), item.row, item.rows, x, item.tokens,
                gate);
  multiply_rows(*config_.gate_up_kernel, weights_.up(node, expert), item.row, item.rows, x, item.tokens, up);
  const int64_t row = weights_.gate_up_rows(node).first + item.row;
  const ops::OpKernels& kernels = ops::op_kernels();
  for (int64_t m = 0; m < item.tokens; ++m) {
    const int64_t position = item.begin + m;
    float *gate_row = gate + m * item.rows, *up_row = up + m * item.rows;
    float* product =
        quantizes_pieces_ ? gate_row
        : quantizes_rows_
            ? scratch.products + position * config_.intermediate + row
            : reinterpret_cast<float*>(scratch.intermediate + position * intermediate_row_bytes_) + row;
    if (config_.has_bias) {
      add(gate_row, gate_bias_of(expert) + row, item.rows);
      add(up_row, up_bias_of(expert) + row, item.rows);
    }
    kernels.activate(config_.activation, gate_row, up_row, item.rows, product);
    if (quantizes_pieces_) quantize_piece(scratch, item.group, position, product, row, item.rows);
  }
  if (quantizes_rows_ && !has_many_pairs(scratch)) quantize_finished(scratch, item, thread);
}

// Columns [row, row + rows) of down's input of one position.
void ExpertLayer::quantize_piece(const Lease& scratch, const ExpertGroup& group, int64_t position,
                                 const float* product, int64_t row, int64_t rows) const noexcept {
  const gemm::Kernel& kernel = *config_.down_kernel;
  const int64_t m = first_row(kernel, group) + position - group.begin;
  if (kernel.pack == nullptr || !is_many(group))
    return kernel.quantize(product, row, rows, config_.intermediate, gemm::kAllFine,
                           scratch.intermediate + m * intermediate_row_bytes_);
  alignas(64) std::byte piece[gemm::split_row_bytes(gemm::kMaxSplitTerms, kMaxTileRows)];
  kernel.quantize(product, 0, rows, rows, gemm::kAllFine, piece);
  const int64_t terms = kernel.act == gemm::ActFormat::kBf16x2 ? 2 : 1;
  const int64_t first_line = row / gemm::kSplitColumns * terms,
                lines = ceil_div(rows, gemm::kSplitColumns) * terms;
  const int64_t in_block = m % ExpertGroup::kBlockRows;
  std::byte* block = scratch.intermediate + (m - in_block) * intermediate_row_bytes_;
  for (int64_t line = 0; line < lines; ++line)
    std::memcpy(block + gemm::split_block_offset(first_line + line, in_block),
                piece + line * gemm::kSplitTermBytes, gemm::kSplitTermBytes);
}

// Down's input of positions [begin, end), whole blocks of the group.
void ExpertLayer::quantize_products(const Lease& scratch, const ExpertGroup& group, int64_t begin,
                                    int64_t end, int thread) const noexcept {
  const gemm::Kernel& kernel = *config_.down_kernel;
  const float budget = gemm::act_budget(kernel).product;
  const bool packs = kernel.pack != nullptr && is_many(group);
  const std::byte* rows[ExpertGroup::kBlockRows];
  for (int64_t p = begin; p < end; p += ExpertGroup::kBlockRows) {
    const int64_t count = std::min<int64_t>(ExpertGroup::kBlockRows, end - p);
    std::byte* block =
        scratch.intermediate + (first_row(kernel, group) + p - group.begin) * intermediate_row_bytes_;
    std::byte* dst = packs ? scratch.rows + thread * scratch_size_.rows_per_thread : block;
    for (int64_t i = 0; i < count; ++i, dst += intermediate_row_bytes_) {
      quantize_row(kernel, scratch.products + (p + i) * config_.intermediate, config_.intermediate, budget,
                   dst);
      rows[i] = dst;
    }
    if (packs) kernel.pack(rows, count, config_.intermediate, block);
  }
}

// Whoever adds the last rows of a block of few tokens quantizes it. Blocks are the same on every node.
void ExpertLayer::quantize_finished(const Lease& scratch, const GateUpItem& item, int thread) const noexcept {
  std::atomic<int64_t>& done = scratch.rows_done[item.begin];
  if (done.fetch_add(item.rows, std::memory_order_acq_rel) + item.rows < config_.intermediate) return;
  done.store(0, std::memory_order_relaxed);
  quantize_products(scratch, item.group, item.begin, item.begin + item.tokens, thread);
}

// Many tokens of an expert would be late if one thread did them all.
void ExpertLayer::quantize_many(const Lease& scratch) const noexcept {
  for_each_block(scratch, [&](const ExpertGroup& group, int64_t begin, int64_t end, int thread) noexcept {
    quantize_products(scratch, group, begin, end, thread);
  });
}

}  // namespace proa::moe
