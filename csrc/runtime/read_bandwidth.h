// How fast a set of CPUs reads memory: the floor under decode.
#pragma once

#include <cstddef>
#include <vector>

namespace proa::runtime {

// Best of `repeats` passes over `bytes` of memory, split evenly over one pinned thread per CPU, each of which
// reads what it wrote first (so from its own NUMA node). In 10^9 bytes per second. `cpus` is not empty and
// holds ids below CPU_SETSIZE. Throws std::bad_alloc, std::system_error.
double measure_read_bandwidth(const std::vector<int>& cpus, size_t bytes, int repeats = 5);

}  // namespace proa::runtime
