// Causal attention over a paged KV cache.
#pragma once

#include <cstdint>

#include "runtime/thread_pool.h"

namespace proa::ops {

// Strides in elements; the last dimension of every array is contiguous. Ids, positions and blocks are in
// range: the caller has checked them.
struct PagedAttention {
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  // divides num_heads
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  float scale = 1;

  const float* query = nullptr;  // [num_tokens, num_heads, key_dim]
  int64_t query_stride[2] = {};  // token, head
  float* out = nullptr;          // [num_tokens, num_heads, value_dim]
  int64_t out_stride[2] = {};

  bool bf16 = false;             // keys and values are bf16, otherwise float
  const void* keys = nullptr;    // [slots, num_kv_heads, key_dim]
  int64_t key_stride[2] = {};    // slot, kv head
  const void* values = nullptr;  // [slots, num_kv_heads, value_dim]
  int64_t value_stride[2] = {};

  const int32_t* block_tables = nullptr;  // [sequences, max_blocks]
  int64_t max_blocks = 0;
  int64_t block_size = 0;
  const int32_t* sequence_ids = nullptr;  // [num_tokens]
  const int32_t* positions = nullptr;     // [num_tokens], below INT32_MAX
};

// Throws std::bad_alloc.
void paged_attention(runtime::ThreadPool& pool, const PagedAttention& a);

}  // namespace proa::ops
