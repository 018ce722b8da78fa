#include "ops/kernels.h"

#include "cpu/isa.h"

namespace proa::ops {

const OpKernels& op_kernels() {
  static const OpKernels& chosen = cpu::isa_has(cpu::kAvx512Tier) ? avx512::kKernels
                                   : cpu::isa_has(cpu::kAvx2Tier) ? avx2::kKernels
                                                                  : ref::kKernels;
  return chosen;
}

}  // namespace proa::ops
