#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>
#include <sched.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/pool.h"

namespace nb = nanobind;

namespace proa::bindings {
namespace {

void check_cpus(const std::vector<int>& cpus) {
  if (cpus.empty()) throw std::invalid_argument("[ThreadPool] expected at least one CPU, got none");
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu : cpus)
    if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(static_cast<size_t>(cpu), &allowed))
      throw std::invalid_argument("[ThreadPool] expected CPUs this process may use, got CPU " +
                                  std::to_string(cpu));
}

}  // namespace

void init_runtime(nb::module_& m) {
  nb::class_<Pool>(m, "ThreadPool")
      .def(
          "__init__",
          [](Pool* self, const std::vector<int>& cpus) {
            check_cpus(cpus);
            new (self) Pool{std::make_shared<runtime::ThreadPool>(cpus)};
          },
          nb::arg("cpus"))
      .def_prop_ro("num_threads", [](const Pool& self) { return self.use()->num_threads(); })
      .def("close", [](Pool& self) {
        const auto threads = std::exchange(self.threads, nullptr);
        const nb::gil_scoped_release release;  // joins the workers
        return;
      });
}

}  // namespace proa::bindings
