#include <string>

#include "gemm/kernel.h"

namespace proa::gemm {
namespace {

bool can_run(const Kernel& kernel, const format::Shape& shape, cpu::IsaMask isa) noexcept {
  return (kernel.required_isa & ~isa) == 0 && kernel.reject(shape) == nullptr;
}

bool is_allowed(ActFormat act, Activations activations) noexcept {
  switch (activations) {
    case Activations::kTrunk:
      return act != ActFormat::kBf16;
    case Activations::kInt8:
      return true;
    case Activations::kBf16:
      return !is_int8(act);
  }
  return true;
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
      reason = passed                 ? "a better kernel can run"
               : is_int8(kernel->act) ? "rounds activations to int8, which was not allowed"
                                      : "rounds activations to bf16, which was not allowed";
    passed = passed || kernel == chosen;
    candidates.push_back({kernel, kernel == chosen, std::move(reason)});
  }
  return candidates;
}

const Kernel* select_kernel(format::WeightFormat format, const format::Shape& shape, cpu::IsaMask isa,
                            Activations activations) noexcept {
  const Kernel* best = nullptr;
  for (const Kernel* kernel : all_kernels()) {
    if (kernel->weight != format || !can_run(*kernel, shape, isa)) continue;
    if (is_allowed(kernel->act, activations)) return kernel;
    if (best == nullptr) best = kernel;
  }
  return best;
}

}  // namespace proa::gemm
