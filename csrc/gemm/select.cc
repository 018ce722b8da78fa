#include <string>

#include "gemm/kernel.h"

namespace proa::gemm {
namespace {

bool can_run(const Kernel& kernel, const format::Shape& shape, cpu::IsaMask isa) noexcept {
  return (kernel.required_isa & ~isa) == 0 && kernel.reject(shape) == nullptr;
}

std::string why_not(const Kernel& kernel, const format::Shape& shape, cpu::IsaMask isa) {
  const cpu::IsaMask missing = kernel.required_isa & ~isa;
  if (missing == 0) return kernel.reject(shape);
  std::string reason = "needs";
  for (const std::string& name : cpu::isa_names(missing)) reason += " " + name;
  return reason + ", which this CPU, the system or PROA_FORCE_ISA does not allow";
}

}  // namespace

std::vector<Candidate> explain_selection(format::WeightFormat format, const format::Shape& shape,
                                         cpu::IsaMask isa, Activations activations) {
  std::vector<Candidate> candidates;
  const Kernel* chosen = select_kernel(format, shape, isa, activations);
  bool passed = false;
  for (const Kernel* kernel : all_kernels()) {
    if (kernel->weight != format) continue;
    std::string reason;
    if (!can_run(*kernel, shape, isa))
      reason = why_not(*kernel, shape, isa);
    else if (kernel == chosen)
      reason = "the best kernel that can run";
    else
      reason = passed ? "a better kernel can run" : "rounds activations to int8, which was not allowed";
    passed = passed || kernel == chosen;
    candidates.push_back({kernel, kernel == chosen, std::move(reason)});
  }
  return candidates;
}

const Kernel* select_kernel(format::WeightFormat format, const format::Shape& shape, cpu::IsaMask isa,
                            Activations activations) noexcept {
  const Kernel* only_int8 = nullptr;
  for (const Kernel* kernel : all_kernels()) {
    if (kernel->weight != format || !can_run(*kernel, shape, isa)) continue;
    if (activations == Activations::kInt8 || !is_int8(kernel->act)) return kernel;
    if (only_int8 == nullptr) only_int8 = kernel;
  }
  return only_int8;
}

}  // namespace proa::gemm
