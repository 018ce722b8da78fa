#include <string>

#include "gemm/kernel.h"

namespace proa::gemm {

std::vector<Candidate> explain_selection(format::WeightFormat format, const format::Shape& shape,
                                         cpu::IsaMask isa) {
  std::vector<Candidate> candidates;
  bool found = false;
  for (const Kernel* kernel : all_kernels()) {
    if (kernel->weight != format) continue;
    std::string reason;
    const cpu::IsaMask missing = kernel->required_isa & ~isa;
    if (missing != 0) {
      reason = "needs";
      for (const std::string& name : cpu::isa_names(missing)) reason += " " + name;
      reason += ", which this CPU, the system or PROA_FORCE_ISA does not allow";
    } else if (const char* rejected = kernel->reject(shape)) {
      reason = rejected;
    } else {
      reason = found ? "a better kernel can run" : "the best kernel that can run";
    }
    const bool chosen = !found && missing == 0 && kernel->reject(shape) == nullptr;
    found = found || chosen;
    candidates.push_back({kernel, chosen, std::move(reason)});
  }
  return candidates;
}

const Kernel* select_kernel(format::WeightFormat format, const format::Shape& shape,
                            cpu::IsaMask isa) noexcept {
  for (const Kernel* kernel : all_kernels())
    if (kernel->weight == format && (kernel->required_isa & ~isa) == 0 && kernel->reject(shape) == nullptr)
      return kernel;
  return nullptr;
}

}  // namespace proa::gemm
