// Where VBMI is missing.
#include <immintrin.h>

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "format/fp8_block128.h"
#include "format/fp8_channel.h"
#include "format/mxfp8.h"
#include "gemm/panel.h"
#include "gemm/registry.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace proa::gemm {
namespace avx512bw {
namespace {

// 2 x 12 accumulators, 2 weights and a broadcast of the 32 registers.
constexpr int kPanels = 2;
constexpr int kTokens = 12;
constexpr int kStreams = 4;

#include "gemm/avx512/fp8_pairs_bw-inl.h"
#include "gemm/avx512/vec.h"
#include "gemm/avx512/widened_fp8-inl.h"
#include "gemm/f32_act-inl.h"
#include "gemm/fp8_weights-inl.h"

constexpr Kernel fp8_kernel(const char* name, format::WeightFormat weight,
                            const char* (*reject_shape)(const format::Shape&) noexcept,
                            void (*gemm_fn)(const GemmArgs&) noexcept) {
  return {name, cpu::kAvx512Tier, weight, ActFormat::kF32, reject_shape, nullptr, gemm_fn};
}

}  // namespace
}  // namespace avx512bw

using format::WeightFormat;

const Kernel kAvx512BwFp8Block128 =
    avx512bw::fp8_kernel("avx512bw.fp8_block128", WeightFormat::kFp8Block128, format::any_shape,
                         avx512bw::gemm<avx512bw::Lines<avx512bw::Fp8Block128>>);
const Kernel kAvx512BwFp8Channel =
    avx512bw::fp8_kernel("avx512bw.fp8_channel", WeightFormat::kFp8Channel, format::any_shape,
                         avx512bw::gemm<avx512bw::Lines<avx512bw::Fp8Channel>>);
const Kernel kAvx512BwMxFp8 = avx512bw::fp8_kernel("avx512bw.mxfp8", WeightFormat::kMxFp8,
                                                   format::mxfp8::reject, avx512bw::gemm<avx512bw::MxFp8>);

}  // namespace proa::gemm

#pragma GCC pop_options
