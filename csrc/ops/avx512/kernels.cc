#include "ops/kernels.h"

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

// GCC 12's AVX-512 headers start from undefined vectors on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")

namespace proa::ops::avx512 {
namespace {

// clang-format off: each file uses the ones before it
#include "ops/avx512/lanes-inl.h"
#include "base/exp-inl.h"
#include "ops/exp-inl.h"
#include "ops/activation-inl.h"
#include "ops/rms_norm-inl.h"
#include "ops/attention-inl.h"
// clang-format on
}  // namespace

const OpKernels kKernels = {"avx512", rms_norm, add_rms_norm, attend_f32, attend_bf16,
                            merge,    finish,   activate_row, exp_row};

}  // namespace proa::ops::avx512

#pragma GCC pop_options
