#include "cpu/topology.h"

#include <string>
#include <vector>

#include "tests/check.h"
#include "tests/fake_root.h"

namespace {

using namespace proa::cpu;
using proa::test::FakeRoot;

// Two sockets of two cores with two hardware threads each: cpu, cpu + 4 are one core.
void write_two_sockets(const FakeRoot& root) {
  for (int cpu = 0; cpu < 8; ++cpu) {
    const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu);
    const int core = cpu % 4;
    root.write(dir + "/topology/core_id", std::to_string(core % 2) + "\n");  // repeats on the other socket
    root.write(dir + "/topology/physical_package_id", std::to_string(core / 2) + "\n");
    root.write(dir + "/topology/core_cpus_list",
               std::to_string(core) + "," + std::to_string(core + 4) + "\n");
    root.write(dir + "/cache/index0/level", "1\n");
    root.write(dir + "/cache/index0/type", "Data\n");
    root.write(dir + "/cache/index0/size", "48K\n");
    root.write(dir + "/cache/index1/level", "1\n");
    root.write(dir + "/cache/index1/type", "Instruction\n");
    root.write(dir + "/cache/index1/size", "32K\n");
    root.write(dir + "/cache/index3/level", "3\n");
    root.write(dir + "/cache/index3/size", "32M\n");
  }
  root.write("/sys/devices/system/node/online", "0-1\n");
  root.write("/sys/devices/system/node/node0/cpulist", "0-1,4-5\n");
  root.write("/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       1000 kB\n");
  root.write("/sys/devices/system/node/node1/cpulist", "2-3,6-7\n");
  root.write("/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       2000 kB\n");
  root.write("/proc/cpuinfo", "processor : 0\nvendor_id\t: GenuineIntel\nmodel name\t: Some Xeon\n");
  root.write("/proc/meminfo", "MemTotal: 3000 kB\nHugePages_Free:    7\nHugepagesize:    2048 kB\n");
  root.write("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
}

void reads_two_sockets() {
  const FakeRoot root;
  write_two_sockets(root);
  const Topology t = read_topology(root.path(), {0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(t.physical_cpus == std::vector<int>({0, 1, 2, 3}));
  CHECK_EQ(t.cpus[7].socket, 1);
  CHECK_EQ(t.cpus[7].node, 1);
  CHECK_EQ(t.cpus[7].core, 1);
  CHECK_EQ(t.numa_nodes.size(), 2u);
  CHECK(t.numa_nodes[1].cpus == std::vector<int>({2, 3, 6, 7}));
  CHECK_EQ(t.numa_nodes[1].mem_bytes, 2000u * 1024);
  CHECK_EQ(t.l1d_bytes, 48u * 1024);
  CHECK_EQ(t.l3_bytes, 32u << 20);
  CHECK_EQ(t.vendor, "GenuineIntel");
  CHECK_EQ(t.model_name, "Some Xeon");
  CHECK_EQ(t.transparent_huge_pages, "madvise");
  CHECK_EQ(t.huge_page_bytes, 2u << 20);
  CHECK_EQ(t.reserved_huge_pages, 7u);
  CHECK_EQ(t.cpu_quota, 0.0);
}

void honours_affinity() {
  const FakeRoot root;
  write_two_sockets(root);
  const Topology t = read_topology(root.path(), {2, 5, 6});
  CHECK(t.physical_cpus == std::vector<int>({2, 5}));  // 6 is the other thread of 2, 5 of the absent 1
  CHECK(t.numa_nodes[0].cpus == std::vector<int>({5}));
}

void honours_the_quota_of_every_level() {
  const FakeRoot v2;
  write_two_sockets(v2);
  v2.write("/proc/self/cgroup", "0::/a/b\n");
  v2.write("/sys/fs/cgroup/a/cpu.max", "250000 100000\n");
  v2.write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  const Topology t = read_topology(v2.path(), {0, 1, 2, 3});
  CHECK_EQ(t.cpu_quota, 2.5);
  CHECK(t.physical_cpus == std::vector<int>({0, 2}));  // one on each node

  const FakeRoot v1;
  write_two_sockets(v1);
  v1.write("/proc/self/cgroup", "3:cpuset:/x\n2:cpu,cpuacct:/not/mounted/here\n");
  v1.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n");
  v1.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  CHECK_EQ(read_topology(v1.path(), {0, 1}).cpu_quota, 0.5);
  CHECK_EQ(read_topology(v1.path(), {0, 1}).physical_cpus.size(), 1u);  // never less than one
}

void survives_an_empty_system() {
  const FakeRoot root;
  const Topology t = read_topology(root.path(), {3, 4});
  CHECK(t.physical_cpus == std::vector<int>({3, 4}));
  CHECK_EQ(t.numa_nodes.size(), 1u);
  CHECK(t.numa_nodes[0].cpus == std::vector<int>({3, 4}));
  CHECK_EQ(t.l2_bytes, 0u);
  CHECK_EQ(t.cpu_quota, 0.0);
}

void parses_lists() {
  CHECK(parse_cpu_list("0-2,8\n") == std::vector<int>({0, 1, 2, 8}));
  CHECK(parse_cpu_list("").empty());
  CHECK(parse_cpu_list("x").empty());
  CHECK(parse_cpu_list("5-").size() == 1);
  CHECK(parse_cpu_list("3-1,4") == std::vector<int>({4}));
  CHECK(parse_cpu_list("0-99999999999999999999").empty());
}

void this_machine_has_cpus() {
  const std::vector<int> allowed = allowed_cpus();
  CHECK(!allowed.empty());
  const Topology t = read_topology("", allowed);
  CHECK_EQ(t.cpus.size(), allowed.size());
  CHECK(!t.physical_cpus.empty());
}

}  // namespace

int main() {
  reads_two_sockets();
  honours_affinity();
  honours_the_quota_of_every_level();
  survives_an_empty_system();
  parses_lists();
  this_machine_has_cpus();
  return proa::test::result();
}
