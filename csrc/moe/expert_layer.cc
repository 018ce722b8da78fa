#include "moe/expert_layer.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>

#include "gemm/act_format.h"
#include "moe/tiles.h"
#include "ops/kernels.h"

namespace proa::moe {
namespace {

using format::kPanelRows;

// Results of one down tile per thread, when the largest batch allows.
constexpr int64_t kResultBytes = 8 << 20;
// Quantizing or copying less than this is done by the caller: a fork would take longer.
constexpr int64_t kForkFloats = 64 * 1024;

constexpr int64_t padded(int64_t bytes) noexcept { return ceil_div(bytes, 64) * 64; }

void add(float* sum, const float* row, int64_t n) noexcept {
  for (int64_t r = 0; r < n; ++r) sum[r] += row[r];
}

// sum[r] += weight * row[r], unfused, in every build the same.
void add_scaled(float* sum, const float* row, float weight, int64_t n) noexcept {
  for (int64_t r = 0; r < n; ++r) sum[r] += weight * row[r];
}

}  // namespace

ExpertLayer::ExpertLayer(ExpertWorkspace& workspace, const ExpertLayerConfig& config)
    : workspace_(workspace),
      config_(config),
      gate_shape_{config.intermediate, config.hidden},
      down_shape_{config.hidden, config.intermediate},
      biases_(config.has_bias
                  ? static_cast<size_t>(config.num_experts * (2 * config.intermediate + config.hidden))
                  : 0),
      loaded_(static_cast<size_t>(config.num_experts)) {
  gate_bytes_ = padded(format::packed_bytes(config.gate_up_kernel->weight, gate_shape_));
  expert_bytes_ = 2 * gate_bytes_ + padded(format::packed_bytes(config.down_kernel->weight, down_shape_));
  const auto weight_bytes = static_cast<size_t>(config.num_experts * expert_bytes_);
  weights_ = base::Arena(weight_bytes);
  experts_ = weights_.take<std::byte>(weight_bytes);

  input_row_bytes_ = gemm::act_row_bytes(config.gate_up_kernel->act, config.hidden);
  quantizes_intermediate_ = config.down_kernel->quantize != nullptr;
  intermediate_row_bytes_ = quantizes_intermediate_
                                ? gemm::act_row_bytes(config.down_kernel->act, config.intermediate)
                                : padded(4 * config.intermediate);
  row_step_ = std::max(kTileStep, gemm::act_group(config.down_kernel->act));
  const int64_t max_pairs = workspace.max_tokens() * config.max_top_k;
  const int64_t largest_tile = down_tile_rows(max_pairs, 1);
  scratch_size_ = {.num_experts = config.num_experts,
                   .max_pairs = max_pairs,
                   .input_bytes = workspace.max_tokens() * input_row_bytes_,
                   .gathered_bytes = gemm::reads_in_place(config.gate_up_kernel->act)
                                         ? std::min(max_pairs * input_row_bytes_, kMaxGatheredBytes)
                                         : 0,
                   .intermediate_bytes = max_pairs * intermediate_row_bytes_,
                   .results_per_thread =
                       max_pairs * std::max(kTileStep, std::min(kResultBytes / 4 / max_pairs, largest_tile))};
  workspace.reserve(scratch_size_);
}

void ExpertLayer::load(int64_t expert, const format::RawWeight& gate, const format::RawWeight& up,
                       const format::RawWeight& down, const ExpertBiases& biases) noexcept {
  const std::span<std::byte> own =
      experts_.subspan(static_cast<size_t>(expert * expert_bytes_), static_cast<size_t>(expert_bytes_));
  const std::span<std::byte> places[] = {own, own.subspan(static_cast<size_t>(gate_bytes_)),
                                         own.subspan(static_cast<size_t>(2 * gate_bytes_))};
  const format::RawWeight* raw[] = {&gate, &up, &down};
  const format::WeightFormat formats[] = {config_.gate_up_kernel->weight, config_.gate_up_kernel->weight,
                                          config_.down_kernel->weight};
  for (int i = 0; i < 3; ++i)
    workspace_.pool().parallel_for(raw[i]->shape.panels(), 4, [&](int64_t begin, int64_t end, int) noexcept {
      format::pack_panels(formats[i], *raw[i], places[i], begin, end);
    });
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
  loaded_[static_cast<size_t>(expert)] = 1;
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
  }
  run_down(scratch, batch);
  bytes_read_.fetch_add(static_cast<int64_t>(scratch.groups.active().size()) * expert_bytes_,
                        std::memory_order_relaxed);
  const auto elapsed = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start);
  nanoseconds_.fetch_add(elapsed.count(), std::memory_order_relaxed);
}

// Each token is quantized once, however many experts read it.
gemm::ActRows ExpertLayer::prepare_input(const Lease& scratch, const Batch& batch) const noexcept {
  const int64_t hidden = config_.hidden;
  if (input_row_bytes_ == 0)
    return {reinterpret_cast<const std::byte*>(batch.x), hidden * static_cast<int64_t>(sizeof(float)),
            nullptr};
  const auto quantize = [&](int64_t begin, int64_t end, int) noexcept {
    for (int64_t t = begin; t < end; ++t)
      config_.gate_up_kernel->quantize(batch.x + t * hidden, 0, hidden, hidden,
                                       scratch.input + t * input_row_bytes_);
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
  GateUpPlan& plan = scratch.plan;
  plan.assign(scratch.groups.active(), config_.intermediate, row_step_, scratch.pool.num_threads());
  scratch.pool.parallel_for(plan.num_items(), 1, [&](int64_t item, int64_t, int) noexcept {
    gate_up_item(scratch, plan.item(item), x);
  });
}

// The activations of one item, to the rows of its positions.
void ExpertLayer::gate_up_item(const Lease& scratch, const GateUpItem& item, gemm::ActRows x) const noexcept {
  alignas(64) float gate[kMaxBlockTokens * kMaxTileRows];
  alignas(64) float up[kMaxBlockTokens * kMaxTileRows];
  if (is_gathered(item.group))
    x.data = scratch.gathered + item.begin * input_row_bytes_;
  else
    x.index = scratch.groups.tokens() + item.begin;
  gemm::GemmArgs args{gate_of(item.group.expert),
                      gate_shape_,
                      item.row / kPanelRows,
                      ceil_div(item.row + item.rows, kPanelRows),
                      x,
                      item.tokens,
                      gate,
                      item.rows};
  config_.gate_up_kernel->gemm(args);
  args.weight = up_of(item.group.expert);
  args.out = up;
  config_.gate_up_kernel->gemm(args);
  const ops::OpKernels& kernels = ops::op_kernels();
  for (int64_t m = 0; m < item.tokens; ++m) {
    std::byte* dst = scratch.intermediate + (item.begin + m) * intermediate_row_bytes_;
    float *gate_row = gate + m * item.rows, *up_row = up + m * item.rows;
    float* product = quantizes_intermediate_ ? gate_row : reinterpret_cast<float*>(dst) + item.row;
    if (config_.has_bias) {
      add(gate_row, gate_bias_of(item.group.expert) + item.row, item.rows);
      add(up_row, up_bias_of(item.group.expert) + item.row, item.rows);
    }
    kernels.activate(config_.activation, gate_row, up_row, item.rows, product);
    if (quantizes_intermediate_)
      config_.down_kernel->quantize(product, item.row, item.rows, config_.intermediate, dst);
  }
}

// Few tokens: tiles small enough for several items per thread. Many: as large as equal shares of the threads
// allow, as every tile reads the intermediate of all pairs.
int64_t ExpertLayer::down_tile_rows(int64_t pairs, int64_t experts) const noexcept {
  const int64_t threads = workspace_.pool().num_threads();
  const int64_t share = pairs < kManyTokens * experts ? kItemsPerThread * threads : threads;
  return even_tile(ceil_div(config_.hidden, share), kMaxTileRows, kTileStep);
}

void ExpertLayer::run_down(const Lease& scratch, const Batch& batch) const noexcept {
  const std::span<const ExpertGroup> groups = scratch.groups.active();
  const int64_t pairs = groups.empty() ? 1 : groups.back().end;
  // As many as there is room for the results of.
  const int64_t room = scratch_size_.results_per_thread / pairs / kTileStep * kTileStep;
  const int64_t rows = std::min(room, down_tile_rows(pairs, std::max<int64_t>(1, std::ssize(groups))));
  scratch.pool.parallel_for(ceil_div(config_.hidden, rows), 1,
                            [&](int64_t item, int64_t, int thread) noexcept {
                              const int64_t row = item * rows;
                              down_item(scratch, batch, row, std::min(rows, config_.hidden - row),
                                        scratch.results + thread * scratch_size_.results_per_thread);
                            });
}

// Rows [row, row + rows) of `out`: down for every pair, then each token's sum in the order of its slots.
void ExpertLayer::down_item(const Lease& scratch, const Batch& batch, int64_t row, int64_t rows,
                            float* results) const noexcept {
  for (const ExpertGroup& group : scratch.groups.active()) {
    const gemm::ActRows x{scratch.intermediate + group.begin * intermediate_row_bytes_,
                          intermediate_row_bytes_, nullptr};
    config_.down_kernel->gemm({down_of(group.expert), down_shape_, row / kPanelRows,
                               ceil_div(row + rows, kPanelRows), x, group.size(),
                               results + group.begin * rows, rows});
  }
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
