// The cells that are compiled in. A new cell: one file that defines it, one line here, one line in
// registry.cc.
#pragma once

#include "gemm/kernel.h"

namespace proa::gemm {

extern const Kernel kRefF32, kRefBf16, kRefF16, kRefInt4G32, kRefFp8Block128;
extern const Kernel kAvx2F32, kAvx2Bf16, kAvx2F16, kAvx2Int4G32, kAvx2Fp8Block128;
extern const Kernel kAvxVnniInt4G32;
extern const Kernel kAmxInt8G128, kAvx512Int8G128, kAvxVnniInt8G128, kAvx2Int8G128, kRefInt8G128;
extern const Kernel kAmxBf16, kAmxInt4G32, kAmxFp8Block128;
extern const Kernel kAvx512F32, kAvx512Bf16, kAvx512F16, kAvx512Int4G32, kAvx512Fp8Block128;

}  // namespace proa::gemm
