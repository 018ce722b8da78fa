// The second half of a layer: down for every pair, and each token's sum.
#include <algorithm>
#include <iterator>

#include "moe/expert_layer.h"
#include "moe/rows.h"
#include "moe/tiles.h"

namespace proa::moe {
namespace {

// What a tile of down costs beside its rows, in rows: from the rates of tiles of 32 to 256 rows.
constexpr int64_t kFewTokensOverhead = 2;
constexpr int64_t kManyTokensOverhead = 32;
// Work items of down per thread with many tokens: threads differ in speed by a quarter, and the last item of
// the slowest is waited for.
constexpr int64_t kPartsPerThread = 16;

// sum[r] += weight * row[r], unfused, in every build the same.
void add_scaled(float* sum, const float* row, float weight, int64_t n) noexcept {
  for (int64_t r = 0; r < n; ++r) sum[r] += weight * row[r];
}

}  // namespace

// Few tokens: several tiles per thread, so that one that is late can be made up for. Many: every tile reads
// the intermediate of all pairs, so they are large, and cut by experts too (down_parts).
int64_t ExpertLayer::down_tile_rows(int node, int64_t pairs, int64_t experts) const noexcept {
  const int64_t rows = weights_.down_rows(node).count, threads = workspace_.pool().threads_of(node);
  if (pairs >= kManyTokens * experts)
    return balanced_tile(rows, threads, kMaxTileRows, kTileStep, kManyTokensOverhead);
  return balanced_tile(rows, threads, std::min(kMaxTileRows, rows / (kItemsPerThread * threads)), kTileStep,
                       kFewTokensOverhead);
}

// Into how many parts the experts of each of `tiles` tiles are cut.
int64_t ExpertLayer::down_parts(int node, int64_t pairs, int64_t experts, int64_t tiles) const noexcept {
  if (pairs < kManyTokens * experts || tiles == 0) return 1;
  return std::clamp<int64_t>(ceil_div(kPartsPerThread * workspace_.pool().threads_of(node), tiles), 1,
                             experts);
}

void ExpertLayer::run_down(const Lease& scratch, const Batch& batch) const noexcept {
  const std::span<const ExpertGroup> groups = scratch.groups.active();
  const int64_t pairs = groups.empty() ? 1 : groups.back().end;
  const auto experts = std::max<int64_t>(1, std::ssize(groups));
  // As many as there is room for the results of.
  const int64_t room = scratch_size_.results_per_thread / pairs / kTileStep * kTileStep;
  NodeCounts tile_rows, parts, items, first_slot;
  for (int64_t node = 0, slot = 0; node < scratch.pool.num_nodes(); ++node) {
    const auto i = static_cast<size_t>(node);
    const int n = static_cast<int>(node);
    tile_rows[i] = std::min(room, down_tile_rows(n, pairs, experts));
    const int64_t tiles = ceil_div(weights_.down_rows(n).count, tile_rows[i]);
    parts[i] = down_parts(n, pairs, experts, tiles);
    items[i] = tiles * parts[i];
    first_slot[i] = slot;
    slot += scratch.pool.threads_of(n);
  }
  for (int i = 0; i < scratch.pool.num_threads(); ++i) scratch.result_slots[i].reset();
  scratch.pool.parallel_for_nodes(items, [&](int node, int64_t item, int thread) noexcept {
    const auto i = static_cast<size_t>(node);
    const int64_t index = item / parts[i], slots = scratch.pool.threads_of(node);
    // Parts of a tile meet in a slot of the node, taken in turn; whole tiles need no meeting place.
    const int64_t slot = parts[i] == 1 ? thread : first_slot[i] + index % slots;
    const int64_t row = index * tile_rows[i];
    const DownTile tile{node, row, std::min(tile_rows[i], weights_.down_rows(node).count - row),
                        scratch.results + slot * scratch_size_.results_per_thread};
    if (parts[i] == 1) {
      multiply_down(scratch, tile, 0, pairs);
      add_results(scratch, batch, tile);
      return;
    }
    ResultSlot& results = scratch.result_slots[slot];
    results.await(index / slots);
    const int64_t part = item % parts[i];
    multiply_down(scratch, tile, part * pairs / parts[i], (part + 1) * pairs / parts[i]);
    if (!results.add_part(parts[i])) return;
    add_results(scratch, batch, tile);
    results.release();
  });
}

// The tile's rows of down for the experts whose positions begin in [begin, end).
void ExpertLayer::multiply_down(const Lease& scratch, const DownTile& tile, int64_t begin,
                                int64_t end) const noexcept {
  const gemm::Kernel& kernel = *config_.down_kernel;
  for (const ExpertGroup& group : scratch.groups.active()) {
    if (group.begin < begin || group.begin >= end) continue;
    const gemm::ActRows x{scratch.intermediate + first_row(kernel, group) * intermediate_row_bytes_,
                          intermediate_row_bytes_, nullptr, kernel.pack != nullptr && is_many(group)};
    multiply_rows(kernel, weights_.down(tile.node, group.expert), tile.row, tile.rows, x, group.size(),
                  tile.results + group.begin * tile.rows);
  }
}

// To the tile's rows of `out`: each token's sum in the order of its slots.
void ExpertLayer::add_results(const Lease& scratch, const Batch& batch, const DownTile& tile) const noexcept {
  const int64_t row = tile.row + weights_.down_rows(tile.node).first, rows = tile.rows;
  for (int64_t t = 0; t < batch.num_tokens; ++t) {
    float sum[kMaxTileRows] = {};
    for (int64_t pair = t * batch.top_k; pair < (t + 1) * batch.top_k; ++pair)
      if (const int32_t position = scratch.groups.positions()[pair]; position >= 0) {
        float* result = tile.results + position * rows;
        if (config_.has_bias) add(result, down_bias_of(batch.ids[pair]) + row, rows);
        add_scaled(sum, result, batch.weights[pair], rows);
      }
    float* out = batch.out + t * config_.hidden + row;
    for (int64_t r = 0; r < rows; ++r) out[r] = batch.accumulate ? out[r] + sum[r] : sum[r];
  }
}

}  // namespace proa::moe
