// The parts of the operators that are compiled once per ISA: plain function tables, chosen by op_kernels().
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/activation.h"

namespace proa::ops {

// Positions are handled in tiles, and their results merged in chunks, that start at fixed positions: what a
// row computes depends on its own keys only, not on how work is cut up.
inline constexpr int kTilePositions = 64;
inline constexpr int64_t kChunkPositions = 1024;
static_assert(kChunkPositions % kTilePositions == 0);
// Query rows (tokens x heads) that share one pass over the keys.
inline constexpr int kMaxQueryRows = 64;

constexpr int64_t round_up16(int64_t n) { return (n + 15) / 16 * 16; }

// Running softmax of one query row: values[Dv] is the sum of exp(score - max) * v, `sum` that of exp(score -
// max).
struct SoftmaxState {
  float max;
  float sum;
};

// Query rows of one sequence that read the same kv head.
struct AttentionRows {
  int num_rows = 0;                     // at most kMaxQueryRows
  const float* const* query = nullptr;  // [num_rows], each [key_dim]
  const int32_t* num_keys = nullptr;    // [num_rows]: the row sees positions 0 .. num_keys - 1
  float scale = 1;
};

// Keys and values of that sequence and kv head.
template <class T>  // float, or uint16_t for bf16
struct AttentionCache {
  const T* keys = nullptr;    // of slot 0
  const T* values = nullptr;  // of slot 0
  int64_t key_stride = 0;     // elements from slot to slot
  int64_t value_stride = 0;
  const int32_t* block_table = nullptr;
  int64_t block_size = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
};

// Floats of scratch memory that `chunk` needs, 64-byte aligned.
constexpr int64_t attention_scratch_floats(int64_t num_rows, int64_t key_dim) {
  return num_rows * (round_up16(key_dim) + kTilePositions) + round_up16(key_dim) * kTilePositions + 16 * 16 +
         kMaxQueryRows;
}

struct OpKernels {
  const char* isa;

  // out = x * rsqrt(mean(x^2) + eps) * weight for one row of `size` elements.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out) noexcept;
  // residual += delta first.
  void (*add_rms_norm)(float* residual, const float* delta, const float* weight, float eps, int64_t size,
                       float* out) noexcept;

  // Attention of `rows` over positions [first, first + kChunkPositions), from a fresh softmax. Row r goes to
  // states[r] and values[r * round_up16(value_dim)]; a row that sees no position of the chunk is left alone.
  void (*attend_f32)(const AttentionRows& rows, const AttentionCache<float>& cache, int64_t first,
                     float* scratch, SoftmaxState* states, float* values) noexcept;
  void (*attend_bf16)(const AttentionRows& rows, const AttentionCache<uint16_t>& cache, int64_t first,
                      float* scratch, SoftmaxState* states, float* values) noexcept;
  // Folds the next chunk of a row into its running result.
  void (*merge)(SoftmaxState& state, float* values, SoftmaxState next, const float* next_values,
                int64_t value_dim) noexcept;
  // out = values / sum.
  void (*finish)(SoftmaxState state, const float* values, int64_t value_dim, float* out) noexcept;

  // out[i] of gate[i] and up[i]; `out` may be either of them.
  void (*activate)(const Activation& activation, const float* gate, const float* up, int64_t size,
                   float* out) noexcept;

  // y = e^x for x <= 89 (base/exp-inl.h); `size` is a multiple of 16.
  void (*exp_row)(const float* x, int64_t size, float* y) noexcept;
};

// The table of the best ISA in use.
const OpKernels& op_kernels();

namespace ref {
extern const OpKernels kKernels;
}
namespace avx2 {
extern const OpKernels kKernels;
}
namespace avx512 {
extern const OpKernels kKernels;
}

}  // namespace proa::ops
