#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace proa::bindings {

void init_moe(nb::module_&) {}

}  // namespace proa::bindings
