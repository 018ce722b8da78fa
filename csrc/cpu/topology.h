// The CPUs, caches, NUMA nodes and huge pages this process may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace proa::cpu {

struct Cpu {
  int cpu = 0;   // logical CPU id
  int core = 0;  // core id as the system numbers it, unique within a socket
  int socket = 0;
  int node = 0;    // NUMA node
  int thread = 0;  // of its core, among the allowed ones
};

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;  // the allowed ones only
  uint64_t mem_bytes = 0;
};

struct Topology {
  std::string vendor;
  std::string model_name;
  std::vector<Cpu> cpus;           // allowed by affinity and cpuset, ascending
  std::vector<int> physical_cpus;  // one logical CPU per core, ascending; with a CPU quota the first of those
                                   // worker_cpus() would take, as many as it pays for
  double cpu_quota = 0;            // CPUs the cgroup may use, 0: no limit
  uint64_t l1d_bytes = 0;          // of the first allowed CPU; 0: unknown
  uint64_t l2_bytes = 0;
  uint64_t l3_bytes = 0;
  std::vector<NumaNode> numa_nodes;    // those that have allowed CPUs or memory
  std::string transparent_huge_pages;  // "always", "madvise", "never" or "" (not built into the system)
  uint64_t huge_page_bytes = 0;
  uint64_t reserved_huge_pages = 0;  // of the default size, free
};

// CPUs the scheduler may put the calling thread on; a cgroup's cpuset is part of it.
std::vector<int> allowed_cpus();

// Reads /proc and /sys below `root` ("" on a real system). What is missing there, as in some sandboxes, falls
// back to one socket, one NUMA node and one core per CPU.
Topology read_topology(const std::string& root, const std::vector<int>& allowed);

// The CPUs that `count` threads should run on, by node: one hardware thread of every core before the second
// of any, and nodes in turn, so that few threads use the memory of all nodes. At most as many as there are
// CPUs.
std::vector<Cpu> worker_cpus(const Topology& topology, size_t count);

// "0-3,8" -> 0 1 2 3 8. Anything malformed ends the list.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace proa::cpu
