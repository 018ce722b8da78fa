// The extension module proa.native._C.
#include <nanobind/nanobind.h>

#include <stdexcept>

#include "cpu/isa.h"

namespace nb = nanobind;

namespace proa::bindings {
void init_cpu(nb::module_& m);
void init_runtime(nb::module_& m);
void init_ops(nb::module_& m);
void init_gemm(nb::module_& m);
void init_moe(nb::module_& m);
void init_convert(nb::module_& m);
void init_cuda(nb::module_& m);
}  // namespace proa::bindings

NB_MODULE(_C, m) {
  if (const auto& choice = proa::cpu::isa_choice(); !choice.error.empty())
    throw std::runtime_error(choice.error);
  m.attr("__version__") = PROA_VERSION;
  proa::bindings::init_cpu(m);
  proa::bindings::init_runtime(m);
  proa::bindings::init_ops(m);
  proa::bindings::init_gemm(m);
  proa::bindings::init_moe(m);
  proa::bindings::init_convert(m);
  proa::bindings::init_cuda(m);
}
