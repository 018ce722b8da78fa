#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace proa::bindings {

void init_ops(nb::module_&) {}

}  // namespace proa::bindings
