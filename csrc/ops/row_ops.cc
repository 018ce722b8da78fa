#include "ops/row_ops.h"

#include <algorithm>
#include <cstring>

#include "base/scalar.h"
#include "ops/kernels.h"

namespace proa::ops {
namespace {

// Below this many elements the calling thread is done before the others are awake.
constexpr int64_t kMinParallelElements = 16384;
// Elements a thread takes at a time.
constexpr int64_t kGrainElements = 8192;

// f(row) for every row in [0, count), on several threads when there is enough to do.
template <class F>
void for_each_row(runtime::ThreadPool& pool, int64_t count, int64_t row_elements, F f) noexcept {
  if (count * row_elements < kMinParallelElements) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, row_elements));
  pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// No fma: plain products round alike whatever the compiler makes of the loop.
inline void rotate(float& a, float& b, float cos, float sin) noexcept {
  const float x = a, y = b;
  a = x * cos - y * sin;
  b = y * cos + x * sin;
}

void rotate_row(float* x, const float* cos, const float* sin, int64_t half, bool interleaved) noexcept {
  if (interleaved)
    for (int64_t i = 0; i < half; ++i) rotate(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
  else
    for (int64_t i = 0; i < half; ++i) rotate(x[i], x[i + half], cos[i], sin[i]);
}

inline void copy_row(const float* src, int64_t size, float* dst) noexcept {
  std::memcpy(dst, src, static_cast<size_t>(size) * sizeof(float));
}
inline void copy_row(const float* src, int64_t size, uint16_t* dst) noexcept {
  for (int64_t i = 0; i < size; ++i) dst[i] = base::f32_to_bf16(src[i]);
}
inline void copy_row(const uint16_t* src, int64_t size, float* dst) noexcept {
  for (int64_t i = 0; i < size; ++i) dst[i] = base::bf16_to_f32(src[i]);
}

template <class T>
void store_rows(runtime::ThreadPool& pool, const Rows<const float>& src, const int32_t* slots,
                const Rows<T>& cache) noexcept {
  for_each_row(pool, src.count(), src.size,
               [&](int64_t t) { copy_row(src.row(t), src.size, cache.row(slots[t])); });
}

template <class T>
void gather_rows(runtime::ThreadPool& pool, const Rows<const T>& table, const int32_t* ids,
                 const Rows<float>& out) noexcept {
  for_each_row(pool, out.count(), out.size,
               [&](int64_t t) { copy_row(table.row(ids[t]), out.size, out.row(t)); });
}

}  // namespace

void rms_norm(runtime::ThreadPool& pool, const Rows<const float>& x, const float* weight, float eps,
              const Rows<float>& out) noexcept {
  const auto kernel = op_kernels().rms_norm;
  for_each_row(pool, x.count(), x.size,
               [&](int64_t i) { kernel(x.row(i), weight, eps, x.size, out.row(i)); });
}

void add_rms_norm(runtime::ThreadPool& pool, const Rows<float>& residual, const Rows<const float>& delta,
                  const float* weight, float eps, const Rows<float>& out) noexcept {
  const auto kernel = op_kernels().add_rms_norm;
  for_each_row(pool, residual.count(), residual.size, [&](int64_t i) {
    kernel(residual.row(i), delta.row(i), weight, eps, residual.size, out.row(i));
  });
}

void rope(runtime::ThreadPool& pool, const Rows<float>& x, const Rope& rope) noexcept {
  for_each_row(pool, x.outer, x.inner * rope.half * 2, [&](int64_t t) {
    const int64_t at = rope.positions[t] * rope.half;
    for (int64_t h = 0; h < x.inner; ++h)
      rotate_row(x.row(t * x.inner + h) + rope.offset, rope.cos + at, rope.sin + at, rope.half,
                 rope.interleaved);
  });
}

void kv_store(runtime::ThreadPool& pool, const Rows<const float>& src, const int32_t* slots,
              const Rows<float>& cache) noexcept {
  store_rows(pool, src, slots, cache);
}

void kv_store(runtime::ThreadPool& pool, const Rows<const float>& src, const int32_t* slots,
              const Rows<uint16_t>& cache) noexcept {
  store_rows(pool, src, slots, cache);
}

void embedding_rows(runtime::ThreadPool& pool, const Rows<const float>& table, const int32_t* ids,
                    const Rows<float>& out) noexcept {
  gather_rows(pool, table, ids, out);
}

void embedding_rows(runtime::ThreadPool& pool, const Rows<const uint16_t>& table, const int32_t* ids,
                    const Rows<float>& out) noexcept {
  gather_rows(pool, table, ids, out);
}

}  // namespace proa::ops
