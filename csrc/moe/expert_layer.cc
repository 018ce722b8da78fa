#include "moe/expert_layer.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "gemm/act_format.h"

namespace proa::moe {
namespace {

using format::kPanelRows;

// Row tiles are multiples of 32 rows, so that a tile of the intermediate is whole quantization groups.
constexpr int64_t kTileStep = 32;
constexpr int64_t kGateUpRows = 64;
constexpr int64_t kMaxDownRows = 256;
constexpr int64_t kTokensPerItem = 144;
// Results of one down tile per thread, when the largest batch allows: they should stay in cache until they
// are summed.
constexpr int64_t kResultBytes = 4 << 20;
// Work items per thread below which tiles are made smaller.
constexpr int64_t kItemsPerThread = 4;
// Quantizing less than this is done by the caller: a fork would take longer.
constexpr int64_t kForkFloats = 64 * 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) noexcept { return (a + b - 1) / b; }
constexpr int64_t padded(int64_t bytes) noexcept { return ceil_div(bytes, 64) * 64; }

// The largest tile of at most `rows` rows.
constexpr int64_t down_tile_rows(int64_t rows) noexcept {
  return std::clamp(rows / kTileStep * kTileStep, kTileStep, kMaxDownRows);
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
  const int64_t max_pairs = workspace.max_tokens() * config.max_top_k;
  // Small enough for work for all threads.
  max_down_rows_ = down_tile_rows(config.hidden / (kItemsPerThread * workspace.pool().num_threads()));
  scratch_size_ = {.num_experts = config.num_experts,
                   .max_pairs = max_pairs,
                   .input_bytes = workspace.max_tokens() * input_row_bytes_,
                   .intermediate_bytes = max_pairs * intermediate_row_bytes_,
                   .results_per_thread = std::max(kTileStep * max_pairs,
                                                  std::min(kResultBytes / 4, max_down_rows_ * max_pairs))};
  workspace.reserve(scratch_size_);
}

void ExpertLayer::load(int64_t expert, const format::RawWeight& gate, const format::RawWeight& up,
                       const format::RawWeight& down) noexcept {
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
  loaded_[static_cast<size_t>(expert)] = 1;
}

void ExpertLayer::forward(const Batch& batch) noexcept {
  if (batch.num_tokens == 0) return;
  const Lease scratch(workspace_, scratch_size_);
  const auto start = std::chrono::steady_clock::now();
  scratch.groups.assign({batch.ids, static_cast<size_t>(batch.num_tokens * batch.top_k)}, batch.top_k,
                        config_.num_experts);
  if (!scratch.groups.active().empty()) run_gate_up(scratch, prepare_input(scratch, batch));
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

// Work items are (expert, token block, row tile), numbered through.
void ExpertLayer::run_gate_up(const Lease& scratch, const gemm::ActRows& x) const noexcept {
  const std::span<const ExpertGroup> groups = scratch.groups.active();
  const auto count_items = [&](int64_t tile_rows) noexcept {
    int64_t items = 0;
    for (const ExpertGroup& group : groups)
      items += ceil_div(group.size(), kTokensPerItem) * ceil_div(config_.intermediate, tile_rows);
    return items;
  };
  int64_t tile_rows = kGateUpRows;
  if (count_items(tile_rows) < kItemsPerThread * scratch.pool.num_threads()) tile_rows = kTileStep;
  const int64_t tiles = ceil_div(config_.intermediate, tile_rows);
  scratch.pool.parallel_for(count_items(tile_rows), 1, [&](int64_t item, int64_t, int) noexcept {
    size_t g = 0;
    for (int64_t n; item >= (n = ceil_div(groups[g].size(), kTokensPerItem) * tiles); ++g) item -= n;
    const ExpertGroup& group = groups[g];
    // Token blocks of one tile follow each other, so its weights come from memory once.
    const int64_t blocks = ceil_div(group.size(), kTokensPerItem);
    const int64_t begin = group.begin + item % blocks * kTokensPerItem;
    const int64_t end = std::min<int64_t>(begin + kTokensPerItem, group.end);
    const int64_t row = item / blocks * tile_rows;
    gate_up_item(scratch, {group.expert, static_cast<int32_t>(begin), static_cast<int32_t>(end)}, row,
                 std::min(tile_rows, config_.intermediate - row), x);
  });
}

// Rows [row, row + rows) of silu(gate) * up for one block of an expert's tokens, to the rows of their
// positions.
void ExpertLayer::gate_up_item(const Lease& scratch, const ExpertGroup& tokens, int64_t row, int64_t rows,
                               gemm::ActRows x) const noexcept {
  alignas(64) float gate[kTokensPerItem * kGateUpRows];
  alignas(64) float up[kTokensPerItem * kGateUpRows];
  x.index = scratch.groups.tokens() + tokens.begin;
  gemm::GemmArgs args{
      gate_of(tokens.expert), gate_shape_, row / kPanelRows, ceil_div(row + rows, kPanelRows), x,
      tokens.size(),          gate,        kGateUpRows};
  config_.gate_up_kernel->gemm(args);
  args.weight = up_of(tokens.expert);
  args.out = up;
  config_.gate_up_kernel->gemm(args);
  for (int64_t m = 0; m < tokens.size(); ++m) {
    std::byte* dst = scratch.intermediate + (tokens.begin + m) * intermediate_row_bytes_;
    float* product = quantizes_intermediate_ ? gate + m * kGateUpRows : reinterpret_cast<float*>(dst) + row;
    config_.gate_up_kernel->silu_mul(gate + m * kGateUpRows, up + m * kGateUpRows, product, rows);
    if (quantizes_intermediate_) config_.down_kernel->quantize(product, row, rows, config_.intermediate, dst);
  }
}

void ExpertLayer::run_down(const Lease& scratch, const Batch& batch) const noexcept {
  const std::span<const ExpertGroup> groups = scratch.groups.active();
  const int64_t pairs = groups.empty() ? 1 : groups.back().end;
  // As many as there is room for the results of.
  const int64_t rows = std::min(max_down_rows_, down_tile_rows(scratch_size_.results_per_thread / pairs));
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
    float sum[kMaxDownRows] = {};
    for (int64_t pair = t * batch.top_k; pair < (t + 1) * batch.top_k; ++pair)
      if (const int32_t position = scratch.groups.positions()[pair]; position >= 0)
        add_scaled(sum, results + position * rows, batch.weights[pair], rows);
    float* out = batch.out + t * config_.hidden + row;
    for (int64_t r = 0; r < rows; ++r) out[r] = batch.accumulate ? out[r] + sum[r] : sum[r];
  }
}

}  // namespace proa::moe
