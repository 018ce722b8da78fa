// cpu_info and measure_read_bandwidth.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/pool.h"
#include "cpu/isa.h"
#include "cpu/topology.h"
#include "runtime/read_bandwidth.h"

namespace nb = nanobind;

namespace proa::bindings {
namespace {

nb::dict cpu_info() {
  const cpu::Topology topology = cpu::read_topology("", cpu::allowed_cpus());
  const cpu::IsaChoice& isa = cpu::isa_choice();
  nb::list cpus, nodes;
  for (const cpu::Cpu& c : topology.cpus) {
    nb::dict entry;
    entry["cpu"] = c.cpu;
    entry["core"] = c.core;
    entry["socket"] = c.socket;
    entry["node"] = c.node;
    cpus.append(entry);
  }
  for (const cpu::NumaNode& node : topology.numa_nodes) {
    nb::dict entry;
    entry["id"] = node.id;
    entry["cpus"] = node.cpus;
    entry["mem_bytes"] = node.mem_bytes;
    nodes.append(entry);
  }
  nb::dict caches, huge_pages, info;
  caches["l1d"] = topology.l1d_bytes;
  caches["l2"] = topology.l2_bytes;
  caches["l3"] = topology.l3_bytes;
  huge_pages["transparent"] = topology.transparent_huge_pages;
  huge_pages["page_bytes"] = topology.huge_page_bytes;
  huge_pages["reserved_free"] = topology.reserved_huge_pages;
  info["vendor"] = topology.vendor;
  info["model_name"] = topology.model_name;
  info["isa"] = cpu::isa_names(isa.detected);
  info["isa_in_use"] = isa.tier;
  info["cpus"] = cpus;
  info["physical_cpus"] = topology.physical_cpus;
  info["cpu_quota"] = topology.cpu_quota;
  info["caches"] = caches;
  info["numa_nodes"] = nodes;
  info["huge_pages"] = huge_pages;
  return info;
}

std::vector<std::pair<int, int>> worker_cpus(int64_t count) {
  if (count < 1)
    throw std::invalid_argument("[worker_cpus] expected count of at least 1, got " + std::to_string(count));
  std::vector<std::pair<int, int>> chosen;
  for (const cpu::Cpu& c :
       cpu::worker_cpus(cpu::read_topology("", cpu::allowed_cpus()), static_cast<size_t>(count)))
    chosen.emplace_back(c.cpu, c.node);
  return chosen;
}

size_t checked_bytes(const char* function, const std::vector<int>& cpus, int mebibytes) {
  check_cpus(function, cpus);
  if (mebibytes < 1 || mebibytes > 1 << 20)
    throw std::invalid_argument("[" + std::string(function) + "] expected mebibytes in 1 .. 1048576, got " +
                                std::to_string(mebibytes));
  return static_cast<size_t>(mebibytes) << 20;
}

double measure_read_bandwidth(const std::vector<int>& cpus, int mebibytes) {
  const size_t bytes = checked_bytes("measure_read_bandwidth", cpus, mebibytes);
  const nb::gil_scoped_release release;
  return runtime::measure_read_bandwidth(cpus, bytes);
}

void open_probe(runtime::ReadProbe* self, const std::vector<int>& cpus, int mebibytes) {
  const size_t bytes = checked_bytes("ReadProbe", cpus, mebibytes);
  const nb::gil_scoped_release release;
  new (self) runtime::ReadProbe(cpus, bytes);
}

}  // namespace

void init_cpu(nb::module_& m) {
  m.def("cpu_info", &cpu_info);
  m.def("worker_cpus", &worker_cpus, nb::arg("count"),
        "(CPU, NUMA node) that so many threads should run on, by node: all cores before second hardware "
        "threads, nodes "
        "in turn. Fewer when there are not so many CPUs.");
  nb::class_<runtime::ReadProbe>(m, "ReadProbe", "Memory that threads on `cpus` read through.")
      .def("__init__", &open_probe, nb::arg("cpus"), nb::arg("mebibytes"))
      .def("measure", &runtime::ReadProbe::measure, nb::call_guard<nb::gil_scoped_release>(),
           "Reads all of it once: 10^9 bytes per second.");
  m.def("measure_read_bandwidth", &measure_read_bandwidth, nb::arg("cpus"), nb::arg("mebibytes") = 512);
}

}  // namespace proa::bindings
