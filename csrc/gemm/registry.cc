#include "gemm/registry.h"

namespace proa::gemm {

std::span<const Kernel* const> all_kernels() noexcept {
  static constexpr const Kernel* kAll[] = {
      &kAvx512F32,      &kAvx2F32,           &kRefF32,                                            //
      &kAmxBf16,        &kAvx512Bf16,        &kAvx2Bf16,        &kRefBf16,                        //
      &kAvx512F16,      &kAvx2F16,           &kRefF16,                                            //
      &kAmxInt4G32,     &kAvx512Int4G32,     &kAvxVnniInt4G32,  &kAvx2Int4G32,    &kRefInt4G32,   //
      &kAmxInt8G128,    &kAvx512Int8G128,    &kAvxVnniInt8G128, &kAvx2Int8G128,   &kRefInt8G128,  //
      &kAmxFp8Block128, &kAvx512Fp8Block128, &kAvx2Fp8Block128, &kRefFp8Block128,                 //
  };
  return kAll;
}

}  // namespace proa::gemm
