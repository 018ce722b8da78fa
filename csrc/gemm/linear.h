// Packed linears and their product with activations on a thread pool.
#pragma once

#include <cstdint>
#include <span>

#include "base/arena.h"
#include "gemm/kernel.h"
#include "runtime/thread_pool.h"

namespace proa::gemm {

// A linear [out, in] in kernel layout, in memory of its own.
struct PackedWeight {
  format::WeightFormat format;
  format::Shape shape;
  const Kernel* kernel;
  base::Arena arena;
  std::span<std::byte> bytes;
};

// `kernel` must accept the shape (select_kernel). Throws std::bad_alloc.
PackedWeight pack_weight(runtime::ThreadPool& pool, const Kernel& kernel, const format::RawWeight& raw);

// Packs into memory of the caller: format::packed_bytes, 64-byte aligned.
void pack_into(runtime::ThreadPool& pool, format::WeightFormat format, const format::RawWeight& raw,
               std::span<std::byte> bytes) noexcept;

// out[t] = W x[t] (+ bias), or out[t] += the same. Strides in floats.
struct LinearJob {
  const PackedWeight* weight = nullptr;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  const float* bias = nullptr;  // [out_features]
  bool accumulate = false;
};

// Runs all jobs, whose weights have the same format and shape, on num_tokens tokens each. Throws
// std::bad_alloc.
void run_linears(runtime::ThreadPool& pool, std::span<const LinearJob> jobs, int64_t num_tokens);

}  // namespace proa::gemm
