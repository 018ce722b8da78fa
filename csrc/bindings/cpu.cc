#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace proa::bindings {

void init_cpu(nb::module_&) {}

}  // namespace proa::bindings
