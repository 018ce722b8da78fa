// Operators that work on one row at a time. Strides in elements; the last dimension is contiguous. Ids, slots
// and positions are in range: the caller has checked them.
#pragma once

#include <cstdint>

#include "runtime/thread_pool.h"

namespace proa::ops {

// Rows [outer, inner] of `size` elements: a plain matrix has inner = 1.
template <class T>
struct Rows {
  T* data = nullptr;
  int64_t outer = 0;
  int64_t inner = 1;
  int64_t size = 0;
  int64_t outer_stride = 0;
  int64_t inner_stride = 0;

  int64_t count() const { return outer * inner; }
  T* row(int64_t i) const { return data + i / inner * outer_stride + i % inner * inner_stride; }
};

void rms_norm(runtime::ThreadPool& pool, const Rows<const float>& x, const float* weight, float eps,
              const Rows<float>& out) noexcept;

void add_rms_norm(runtime::ThreadPool& pool, const Rows<float>& residual, const Rows<const float>& delta,
                  const float* weight, float eps, const Rows<float>& out) noexcept;

// Rotates elements offset .. offset + 2 * half of each row of `x` [tokens, heads]. cos, sin: [positions,
// half].
struct Rope {
  const float* cos = nullptr;
  const float* sin = nullptr;
  int64_t half = 0;
  const int32_t* positions = nullptr;  // [tokens]
  int64_t offset = 0;
  bool interleaved = false;  // pairs (2i, 2i + 1), otherwise (i, i + half)
};
void rope(runtime::ThreadPool& pool, const Rows<float>& x, const Rope& rope) noexcept;

// cache row slots[t] = src row t, for a float or bf16 cache.
void kv_store(runtime::ThreadPool& pool, const Rows<const float>& src, const int32_t* slots,
              const Rows<float>& cache) noexcept;
void kv_store(runtime::ThreadPool& pool, const Rows<const float>& src, const int32_t* slots,
              const Rows<uint16_t>& cache) noexcept;

// out row t = table row ids[t], for a float or bf16 table.
void embedding_rows(runtime::ThreadPool& pool, const Rows<const float>& table, const int32_t* ids,
                    const Rows<float>& out) noexcept;
void embedding_rows(runtime::ThreadPool& pool, const Rows<const uint16_t>& table, const int32_t* ids,
                    const Rows<float>& out) noexcept;

}  // namespace proa::ops
