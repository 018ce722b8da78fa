#include "moe/expert_workspace.h"

#include <cstring>
#include <utility>

namespace proa::moe {
namespace {

int64_t padded(int64_t bytes) noexcept {
  return static_cast<int64_t>(base::Arena::padded(static_cast<size_t>(bytes)));
}

}  // namespace

int64_t ScratchSize::bytes(int num_threads) const noexcept {
  return padded(input_bytes) + padded(gathered_bytes) + padded(product_bytes) + padded(intermediate_bytes) +
         padded(num_threads * rows_per_thread) +
         padded(num_threads * results_per_thread * static_cast<int64_t>(sizeof(float)));
}

void ExpertWorkspace::reserve(const ScratchSize& size) {
  const std::lock_guard lock(busy_);
  const auto bytes = static_cast<size_t>(size.bytes(pool_.num_threads()));
  if (bytes > block_.size()) {
    base::Arena larger(bytes);
    block_ = larger.take<std::byte>(bytes);
    arena_ = std::move(larger);
  }
  groups_.reserve(size.num_experts, size.max_pairs);
  if (size.max_pairs > max_pairs_) {
    rows_done_ = std::make_unique<std::atomic<int64_t>[]>(static_cast<size_t>(size.max_pairs));
    max_pairs_ = size.max_pairs;
  }
  for (GateUpPlan& plan : plans_) plan.reserve(size.num_experts);
}

void ExpertWorkspace::touch() noexcept {
  const std::lock_guard lock(busy_);
  if (pool_.num_nodes() == 1 && !block_.empty()) std::memset(block_.data(), 0, block_.size());
}

ExpertWorkspace::Lease::Lease(ExpertWorkspace& workspace, const ScratchSize& size) noexcept
    : pool(workspace.pool_), groups(workspace.groups_), plans(workspace.plans_), lock_(workspace.busy_) {
  // Not in the initializers: reserve() may move the block until the lock is held.
  input = workspace.block_.data();
  gathered = input + padded(size.input_bytes);
  std::byte* floats = gathered + padded(size.gathered_bytes);
  products = reinterpret_cast<float*>(floats);
  intermediate = floats + padded(size.product_bytes);
  rows = intermediate + padded(size.intermediate_bytes);
  results = reinterpret_cast<float*>(rows + padded(pool.num_threads() * size.rows_per_thread));
  rows_done = workspace.rows_done_.get();
  result_slots = workspace.result_slots_.get();
}

int64_t ExpertWorkspace::bytes() const noexcept {
  const std::lock_guard lock(busy_);
  int64_t bytes = static_cast<int64_t>(arena_.capacity()) + groups_.bytes() +
                  max_pairs_ * static_cast<int64_t>(sizeof(std::atomic<int64_t>));
  for (const GateUpPlan& plan : plans_) bytes += plan.bytes();
  return bytes;
}

}  // namespace proa::moe
