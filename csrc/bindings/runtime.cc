// ThreadPool.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "bindings/pool.h"
#include "cpu/topology.h"

namespace nb = nanobind;

namespace proa::bindings {
namespace {

constexpr size_t kMaxThreads = 4096;

void open_pool(Pool* self, const std::vector<int>& cpus, const std::vector<int>& nodes) {
  check_cpus("ThreadPool", cpus);
  if (!nodes.empty() && nodes.size() != cpus.size())
    throw std::invalid_argument("[ThreadPool] expected a node for each of the " +
                                std::to_string(cpus.size()) + " CPUs, got " + std::to_string(nodes.size()));
  if (std::set<int>(nodes.begin(), nodes.end()).size() > runtime::ThreadPool::kMaxNodes)
    throw std::invalid_argument("[ThreadPool] expected at most " +
                                std::to_string(runtime::ThreadPool::kMaxNodes) + " nodes, got more");
  if (cpus.size() > kMaxThreads)
    throw std::invalid_argument("[ThreadPool] expected at most 4096 CPUs, got " +
                                std::to_string(cpus.size()));
  new (self) Pool{std::make_shared<runtime::ThreadPool>(cpus, nodes)};
}

void close_pool(Pool& self) {
  auto threads = std::exchange(self.threads, nullptr);
  const nb::gil_scoped_release release;
  threads.reset();  // joins the workers
}

}  // namespace

void check_cpus(const char* function, const std::vector<int>& cpus) {
  const std::string where = std::string("[") + function + "] expected ";
  if (cpus.empty()) throw std::invalid_argument(where + "at least one CPU, got none");
  const std::vector<int> allowed = cpu::allowed_cpus();
  for (int cpu : cpus)
    if (!std::binary_search(allowed.begin(), allowed.end(), cpu))
      throw std::invalid_argument(where + "CPUs this process may use, got CPU " + std::to_string(cpu));
}

void init_runtime(nb::module_& m) {
  nb::class_<Pool>(m, "ThreadPool")
      .def("__init__", &open_pool, nb::arg("cpus"), nb::arg("nodes") = std::vector<int>{},
           "A worker per CPU, the first of them the caller. nodes: the NUMA node of each; without, all are "
           "on one.")
      .def_prop_ro("num_threads", [](const Pool& self) { return self.use()->num_threads(); })
      .def_prop_ro("num_nodes", [](const Pool& self) { return self.use()->num_nodes(); })
      .def("close", &close_pool);
}

}  // namespace proa::bindings
