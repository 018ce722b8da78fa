#include "gemm/registry.h"

#include <vector>

namespace proa::gemm {
namespace {

// Cells of one format only, best first within a format; before the tables.
constexpr const Kernel* kSingle[] = {
    &kAvx512F32,       &kAvx2F32,
    &kRefF32,  //
    &kAmxBf16,         &kAmxBf16x2,        &kAvx512Bf16,        &kAvx2Bf16,
    &kRefBf16,  //
    &kAvx512F16,       &kAvx2F16,
    &kRefF16,  //
    &kAmxInt8G128,     &kAvx512Int8G128,   &kAvxVnniInt8G128,   &kAvx2Int8G128,
    &kRefInt8G128,  //
    &kAmxFp8Block128,  &kAmxFp8Block128x2, &kAvx512Fp8Block128, &kAvx512BwFp8Block128,
    &kAvx2Fp8Block128,
    &kRefFp8Block128,  //
    &kAmxFp8Channel,   &kAmxFp8Channelx2,  &kAvx512Fp8Channel,  &kAvx512BwFp8Channel,
    &kAvx2Fp8Channel,
    &kRefFp8Channel,  //
    &kAmxMxFp8,        &kAmxMxFp8x2,       &kAvx512MxFp8,       &kAvx512BwMxFp8,
    &kAvx2MxFp8,
    &kRefMxFp8,  //
};

std::vector<const Kernel*> collect() {
  std::vector<const Kernel*> all(std::begin(kSingle), std::end(kSingle));
  for (const auto cells : {amx_grouped_cells(), avx512_vnni_grouped_cells(), avx512_bw_grouped_cells(),
                           avx_vnni_grouped_cells(), avx2_grouped_cells(), ref_grouped_cells(),
                           avx512_grouped_f32_cells(), avx2_grouped_f32_cells(), ref_grouped_f32_cells()})
    for (const Kernel& kernel : cells) all.push_back(&kernel);
  return all;
}

}  // namespace

std::span<const Kernel* const> all_kernels() noexcept {
  static const std::vector<const Kernel*> all = collect();
  return all;
}

}  // namespace proa::gemm
