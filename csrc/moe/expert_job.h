// A forward of an expert layer at fixed addresses, for a thread that runs it without arguments.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "moe/expert_layer.h"

namespace proa::moe {

// `batch.ids` and `batch.weights` may be written by another device between runs. An id that is neither -1 nor
// a loaded expert is a fault: it is counted and its slot adds nothing.
class ExpertJob {
 public:
  // `layer` must outlive the job. Throws std::bad_alloc.
  ExpertJob(ExpertLayer& layer, const ExpertLayer::Batch& batch, const int32_t* tokens)
      : layer_(layer),
        batch_(batch),
        tokens_(tokens),
        ids_(static_cast<size_t>(batch.num_tokens * batch.top_k)) {}

  void run() noexcept {
    ExpertLayer::Batch batch = batch_;
    batch.num_tokens = *tokens_;
    if (batch.num_tokens < 0 || batch.num_tokens > batch_.num_tokens) {
      faults_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    batch.ids = checked_ids(static_cast<size_t>(batch.num_tokens * batch.top_k));
    const int64_t before = layer_.nanoseconds();
    layer_.forward(batch);
    nanoseconds_.fetch_add(layer_.nanoseconds() - before, std::memory_order_relaxed);
  }
  // As runtime::StreamWorker::Job.
  static void run_job(void* job) noexcept { static_cast<ExpertJob*>(job)->run(); }

  int64_t faults() const noexcept { return faults_.load(std::memory_order_relaxed); }
  // Totals of all runs: slots of tokens, and those of them whose expert was computed here.
  int64_t slots() const noexcept { return slots_.load(std::memory_order_relaxed); }
  int64_t own_slots() const noexcept { return own_slots_.load(std::memory_order_relaxed); }
  // What its runs have taken of ExpertLayer::nanoseconds.
  int64_t nanoseconds() const noexcept { return nanoseconds_.load(std::memory_order_relaxed); }

 private:
  const int32_t* checked_ids(size_t count) noexcept {
    int64_t own = 0;
    for (size_t i = 0; i < count; ++i) {
      const int32_t id = batch_.ids[i];
      const bool usable = id >= 0 && id < layer_.config().num_experts && layer_.is_loaded(id);
      if (!usable && id != -1) faults_.fetch_add(1, std::memory_order_relaxed);
      ids_[i] = usable ? id : -1;
      own += usable;
    }
    slots_.fetch_add(static_cast<int64_t>(count), std::memory_order_relaxed);
    own_slots_.fetch_add(own, std::memory_order_relaxed);
    return ids_.data();
  }

  ExpertLayer& layer_;
  ExpertLayer::Batch batch_;
  const int32_t* tokens_;
  std::vector<int32_t> ids_;
  std::atomic<int64_t> faults_{0}, slots_{0}, own_slots_{0}, nanoseconds_{0};
};

}  // namespace proa::moe
