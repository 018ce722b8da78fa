// What an AMX cell shares with the avx512 cells as it is.
#pragma once

#include "gemm/registry.h"

namespace proa::gemm::amx {

inline void silu_mul(const float* gate, const float* up, float* out, int64_t n) noexcept {
  kAvx512F32.silu_mul(gate, up, out, n);
}

}  // namespace proa::gemm::amx
