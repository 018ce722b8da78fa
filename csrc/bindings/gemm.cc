#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace proa::bindings {

void init_gemm(nb::module_&) {}

}  // namespace proa::bindings
