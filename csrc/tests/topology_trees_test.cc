// The topology of whole machines, from their files under /proc and /sys as text (data/topology).
//
// A line is `path = content`; `allowed = LIST` are the CPUs of the affinity mask. A range {a-b} in the path
// repeats the line, {} is then the number it stands at, {+n} and {-n} that number plus or minus n.
#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "cpu/topology.h"
#include "tests/check.h"
#include "tests/fake_root.h"

namespace {

using namespace proa::cpu;

std::string fill_in(std::string text, int number) {
  for (size_t open; (open = text.find('{')) != std::string::npos;) {
    const size_t close = text.find('}', open);
    const std::string offset = text.substr(open + 1, close - open - 1);
    text.replace(open, close - open + 1, std::to_string(number + (offset.empty() ? 0 : std::stoi(offset))));
  }
  return text;
}

Topology read_tree(const std::string& name) {
  const proa::test::FakeRoot root;
  std::ifstream file(std::string(PROA_TEST_DATA) + "/topology/" + name + ".txt");
  CHECK(file.good());
  std::vector<int> allowed;
  for (std::string line; std::getline(file, line);) {
    const size_t equals = line.find(" =");
    if (line.empty() || line[0] == '#' || equals == std::string::npos) continue;
    const std::string path = line.substr(0, equals);
    const std::string content = line.size() > equals + 3 ? line.substr(equals + 3) : "";
    const size_t open = path.find('{');
    if (path == "allowed") {
      allowed = parse_cpu_list(content);
    } else if (open == std::string::npos) {
      root.write(path, content + "\n");
    } else {
      const size_t close = path.find('}', open);
      for (int i : parse_cpu_list(path.substr(open + 1, close - open - 1)))
        root.write(path.substr(0, open) + std::to_string(i) + path.substr(close + 1),
                   fill_in(content, i) + "\n");
    }
  }
  CHECK(!allowed.empty());
  return read_topology(root.path(), allowed);
}

std::vector<int> workers(const Topology& t, size_t count) {
  std::vector<int> cpus;
  for (const Cpu& cpu : worker_cpus(t, count)) cpus.push_back(cpu.cpu);
  return cpus;
}

// Workers on each node that has any, by node.
std::vector<int> workers_by_node(const Topology& t, size_t count) {
  std::vector<int> counts;
  int last = -1;
  for (const Cpu& cpu : worker_cpus(t, count)) {
    CHECK(cpu.node >= last);
    if (cpu.node != last) counts.push_back(0);
    last = cpu.node;
    ++counts.back();
  }
  return counts;
}

using Ints = std::vector<int>;

// `cores` run by default, no two of them the same core; `by_node` of them on each node.
void runs_on(const Topology& t, size_t logical, int cores, const Ints& by_node) {
  CHECK_EQ(t.cpus.size(), logical);
  CHECK_EQ(t.physical_cpus.size(), static_cast<size_t>(cores));
  CHECK(workers_by_node(t, t.physical_cpus.size()) == by_node);
  for (const Cpu& cpu : worker_cpus(t, t.physical_cpus.size())) {
    CHECK_EQ(cpu.thread, 0);
    CHECK(std::binary_search(t.physical_cpus.begin(), t.physical_cpus.end(), cpu.cpu));
  }
  // More than there are: every CPU once.
  Ints all = workers(t, 10 * logical);
  std::sort(all.begin(), all.end());
  CHECK_EQ(all.size(), logical);
  CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
}

void one_socket() {
  const Topology t = read_tree("ryzen_7950x");
  runs_on(t, 32, 16, {16});
  CHECK(workers(t, 3) == Ints({0, 1, 2}));
  CHECK(workers(t, 18) == Ints({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}));
  CHECK_EQ(t.cpus[17].core, 1);
  CHECK_EQ(t.cpus[17].thread, 1);
  CHECK_EQ(t.l1d_bytes, 32u << 10);
  CHECK_EQ(t.l2_bytes, 1u << 20);
  CHECK_EQ(t.l3_bytes, 32u << 20);
}

void two_sockets() {
  const Topology on = read_tree("xeon_6454s_x2"), off = read_tree("xeon_6454s_x2_smt_off");
  runs_on(on, 128, 64, {32, 32});
  runs_on(off, 64, 64, {32, 32});
  CHECK(on.physical_cpus == off.physical_cpus);
  // Few threads are spread over the sockets, odd ones to the first.
  CHECK(workers(on, 3) == Ints({0, 1, 32}));
  CHECK(workers_by_node(on, 15) == Ints({8, 7}));
  CHECK(workers_by_node(on, 66) == Ints({33, 33}));
  CHECK_EQ(on.cpus[100].socket, 1);
  CHECK_EQ(on.cpus[100].node, 1);
  CHECK_EQ(on.numa_nodes[1].mem_bytes, uint64_t{528440632} * 1024);
}

void sub_numa_clusters() {
  const Topology three = read_tree("xeon_6980p_snc3"), six = read_tree("xeon_6972p_x2_snc3");
  runs_on(three, 128, 128, {43, 43, 42});
  CHECK(workers(three, 5) == Ints({0, 1, 43, 44, 86}));
  runs_on(six, 384, 192, {32, 32, 32, 32, 32, 32});
  CHECK(workers_by_node(six, 23) == Ints({4, 4, 4, 4, 4, 3}));
  CHECK(workers(six, 6) == Ints({0, 32, 64, 96, 128, 160}));
}

void four_nodes_per_socket() {
  const Topology t = read_tree("epyc_9654_nps4");
  runs_on(t, 192, 96, {24, 24, 24, 24});
  CHECK(workers(t, 4) == Ints({0, 24, 48, 72}));
  CHECK(t.numa_nodes[3].cpus.size() == 48);
}

// Five cores 29 .. 33 across the sockets; 93 and 97 are second threads of 29 and 33.
void containers() {
  const Topology cpuset = read_tree("container_cpuset"), quota = read_tree("container_quota");
  runs_on(cpuset, 7, 5, {3, 2});
  CHECK(cpuset.physical_cpus == Ints({29, 30, 31, 32, 33}));
  CHECK(workers(cpuset, 6) == Ints({29, 30, 31, 93, 32, 33}));
  CHECK_EQ(cpuset.cpu_quota, 0.0);
  runs_on(quota, 128, 5, {3, 2});
  CHECK_EQ(quota.cpu_quota, 5.5);
}

void odd_ones() {
  const Topology cxl = read_tree("offline_and_cxl");
  runs_on(cxl, 6, 6, {6});
  CHECK_EQ(cxl.numa_nodes.size(), 2u);
  CHECK(cxl.numa_nodes[1].cpus.empty());
  CHECK_EQ(cxl.numa_nodes[1].mem_bytes, uint64_t{256} << 30);

  const Topology sandbox = read_tree("gvisor");
  runs_on(sandbox, 4, 4, {4});
  CHECK_EQ(sandbox.numa_nodes.size(), 1u);
  CHECK_EQ(sandbox.numa_nodes[0].mem_bytes, uint64_t{8} << 30);

  const Topology old = read_tree("old_kernel");
  runs_on(old, 8, 4, {2, 2});
  CHECK_EQ(old.numa_nodes[1].mem_bytes, 0u);
}

}  // namespace

int main() {
  one_socket();
  two_sockets();
  sub_numa_clusters();
  four_nodes_per_socket();
  containers();
  odd_ones();
  return proa::test::result();
}
