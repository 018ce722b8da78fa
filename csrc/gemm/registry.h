// The cells that are compiled in. A new cell: one file that defines it, one line here, one line in
// registry.cc. The cells of grouped formats come as one table per ISA (gemm/grouped_cells.h).
#pragma once

#include <span>

#include "gemm/kernel.h"

namespace proa::gemm {

extern const Kernel kRefF32, kRefBf16, kRefF16, kRefFp8Block128, kRefFp8Channel, kRefMxFp8;
extern const Kernel kAvx2F32, kAvx2Bf16, kAvx2F16, kAvx2Fp8Block128, kAvx2Fp8Channel, kAvx2MxFp8;
extern const Kernel kAmxInt8G128, kAvx512Int8G128, kAvxVnniInt8G128, kAvx2Int8G128, kRefInt8G128;
extern const Kernel kAmxBf16, kAmxFp8Block128, kAmxFp8Channel, kAmxMxFp8;
extern const Kernel kAmxBf16x2, kAmxFp8Block128x2, kAmxFp8Channelx2, kAmxMxFp8x2;  // two bf16 terms
extern const Kernel kAvx512F32, kAvx512Bf16, kAvx512F16;
extern const Kernel kAvx512Fp8Block128, kAvx512Fp8Channel, kAvx512MxFp8;
extern const Kernel kAvx512BwFp8Block128, kAvx512BwFp8Channel, kAvx512BwMxFp8;

std::span<const Kernel> amx_grouped_cells() noexcept;
std::span<const Kernel> avx512_vnni_grouped_cells() noexcept;
std::span<const Kernel> avx512_bw_grouped_cells() noexcept;
std::span<const Kernel> avx_vnni_grouped_cells() noexcept;
std::span<const Kernel> avx2_grouped_cells() noexcept;
std::span<const Kernel> ref_grouped_cells() noexcept;
// The same formats with f32 activations.
std::span<const Kernel> avx512_grouped_f32_cells() noexcept;
std::span<const Kernel> avx2_grouped_f32_cells() noexcept;
std::span<const Kernel> ref_grouped_f32_cells() noexcept;

// The cell of `weight`, which must be among `cells`.
inline const Kernel& cell_of(std::span<const Kernel> cells, format::WeightFormat weight) noexcept {
  size_t i = 0;
  while (cells[i].weight != weight) ++i;
  return cells[i];
}

}  // namespace proa::gemm
