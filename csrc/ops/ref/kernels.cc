#include "ops/kernels.h"

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/scalar.h"

namespace proa::ops::ref {
namespace {

// clang-format off: each file uses the ones before it
#include "ops/ref/lanes-inl.h"
#include "base/exp-inl.h"
#include "ops/exp-inl.h"
#include "ops/activation-inl.h"
#include "ops/rms_norm-inl.h"
#include "ops/attention-inl.h"
// clang-format on
}  // namespace

const OpKernels kKernels = {"ref", rms_norm, add_rms_norm, attend_f32, attend_bf16,
                            merge, finish,   activate_row, exp_row};

}  // namespace proa::ops::ref
