// How one attention call is cut into work items.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/paged_attention.h"

namespace proa::ops {

// Query rows (num_tokens tokens x num_heads heads, token-major) of one sequence and kv head, and the chunks
// they read.
struct AttentionItem {
  int32_t first_token = 0;
  int32_t num_tokens = 0;
  int32_t kv_head = 0;
  int32_t first_head = 0;  // query head
  int32_t num_heads = 0;
  int32_t first_chunk = 0;
  int32_t end_chunk = 0;
  int32_t group = -1;  // index of the split group this item is part of, -1: it is whole
  int64_t cost = 0;

  int num_rows() const { return num_tokens * num_heads; }
};

// Items over the same rows and successive chunks, merged once all are done.
struct SplitGroup {
  AttentionItem rows;      // all chunks
  int64_t first_part = 0;  // index of the first chunk's partial result
};

struct AttentionPlan {
  std::vector<AttentionItem> items;  // the costly ones first
  std::vector<SplitGroup> groups;
  int max_rows = 0;
  int64_t num_parts = 0;
  int64_t cost = 0;  // multiply-adds
};

// The plan changes how long the call takes, never a bit of its result.
AttentionPlan plan_attention(const PagedAttention& a, int num_threads);

}  // namespace proa::ops
