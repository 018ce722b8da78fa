#include "cpu/topology.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <tuple>
#include <utility>

namespace proa::cpu {
namespace {

constexpr int kMaxNumaNodes = 1024;

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string read_line(const std::string& path) {
  const std::string text = read_text(path).value_or("");
  return text.substr(0, text.find('\n'));
}

int read_int(const std::string& path, int otherwise) {
  const std::string line = read_line(path);
  char* end = nullptr;
  const long value = std::strtol(line.c_str(), &end, 10);
  return end == line.c_str() ? otherwise : static_cast<int>(value);
}

// The number after `key` in lines such as "MemTotal:  123 kB"; 0 when absent.
uint64_t number_after(const std::string& text, const std::string& key) {
  const size_t at = text.find(key);
  if (at == std::string::npos) return 0;
  return std::strtoull(text.c_str() + text.find_first_of("0123456789", at + key.size()), nullptr, 10);
}

// "vendor_id : GenuineIntel" -> "GenuineIntel"
std::string value_of(const std::string& text, const std::string& key) {
  std::stringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    const size_t start = line.find_first_not_of(" \t", colon + 1);
    return start == std::string::npos ? "" : line.substr(start);
  }
  return "";
}

uint64_t parse_size(const std::string& text) {  // "32K", "1024K", "8M"
  char* end = nullptr;
  const uint64_t value = std::strtoull(text.c_str(), &end, 10);
  return value << (*end == 'K' ? 10 : *end == 'M' ? 20 : *end == 'G' ? 30 : 0);
}

void read_caches(const std::string& root, int cpu, Topology& topology) {
  for (int index = 0; index < 8; ++index) {
    const std::string dir =
        root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index);
    const uint64_t bytes = parse_size(read_line(dir + "/size"));
    const int level = read_int(dir + "/level", 0);
    if (level == 1 && read_line(dir + "/type") == "Data") topology.l1d_bytes = bytes;
    if (level == 2) topology.l2_bytes = bytes;
    if (level == 3) topology.l3_bytes = bytes;
  }
}

void read_cpus(const std::string& root, const std::vector<int>& allowed, Topology& topology) {
  std::map<std::string, int>
      threads;  // of each core; the sibling list names a core uniquely on the whole machine
  for (int cpu : allowed) {
    const std::string dir = root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology";
    topology.cpus.push_back({.cpu = cpu,
                             .core = read_int(dir + "/core_id", cpu),
                             .socket = std::max(0, read_int(dir + "/physical_package_id", 0)),
                             .node = 0,
                             .thread = 0});
    std::string core = read_line(dir + "/core_cpus_list");
    if (core.empty()) core = read_line(dir + "/thread_siblings_list");
    if (core.empty()) core = std::to_string(cpu);
    topology.cpus.back().thread = threads[core]++;
  }
}

void read_numa(const std::string& root, Topology& topology) {
  const std::string base = root + "/sys/devices/system/node";
  std::vector<int> ids = parse_cpu_list(read_line(base + "/online"));
  if (static_cast<int>(ids.size()) > kMaxNumaNodes) ids.clear();
  for (int id : ids) {
    const std::string dir = base + "/node" + std::to_string(id);
    const std::vector<int> members = parse_cpu_list(read_line(dir + "/cpulist"));
    NumaNode node{.id = id,
                  .cpus = {},
                  .mem_bytes = number_after(read_text(dir + "/meminfo").value_or(""), "MemTotal:") * 1024};
    for (Cpu& cpu : topology.cpus) {
      if (std::find(members.begin(), members.end(), cpu.cpu) == members.end()) continue;
      cpu.node = id;
      node.cpus.push_back(cpu.cpu);
    }
    if (!node.cpus.empty() || node.mem_bytes > 0) topology.numa_nodes.push_back(std::move(node));
  }
  if (!topology.numa_nodes.empty()) return;
  NumaNode all{.id = 0,
               .cpus = {},
               .mem_bytes = number_after(read_text(root + "/proc/meminfo").value_or(""), "MemTotal:") * 1024};
  for (const Cpu& cpu : topology.cpus) all.cpus.push_back(cpu.cpu);
  topology.numa_nodes.push_back(std::move(all));
}

// CPUs allowed by one cgroup directory, 0 when it sets no limit.
double quota_in(const std::string& v2_dir, const std::string& v1_dir) {
  std::stringstream v2(read_line(v2_dir + "/cpu.max"));
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period)
    return quota == "max" || period <= 0 ? 0 : std::strtod(quota.c_str(), nullptr) / period;
  const int v1_quota = read_int(v1_dir + "/cpu.cfs_quota_us", -1);
  const int v1_period = read_int(v1_dir + "/cpu.cfs_period_us", 0);
  return v1_quota > 0 && v1_period > 0 ? static_cast<double>(v1_quota) / v1_period : 0;
}

// Smallest limit of our cgroup and its ancestors. In a container the path named by /proc may not exist below
// the mount; walking up ends at the mount itself, which is the container's own group.
double read_cpu_quota(const std::string& root) {
  std::string path;
  std::stringstream groups(read_text(root + "/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers = line.substr(first, second - first + 1);  // ":cpu,cpuacct:", v2: "::"
    std::replace(controllers.begin(), controllers.end(), ',', ':');
    const bool v2 = controllers == "::";
    if (v2 ? path.empty() : controllers.find(":cpu:") != std::string::npos) path = line.substr(second + 1);
  }
  const std::string mount = root + "/sys/fs/cgroup";
  double smallest = 0;
  for (;;) {
    const double quota = quota_in(mount + path, mount + "/cpu" + path);
    if (quota > 0 && (smallest == 0 || quota < smallest)) smallest = quota;
    if (path.empty() || path == "/") return smallest;
    path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

void read_huge_pages(const std::string& root, Topology& topology) {
  const std::string modes = read_line(root + "/sys/kernel/mm/transparent_hugepage/enabled");
  const size_t open = modes.find('['), close = modes.find(']');
  if (open != std::string::npos && close != std::string::npos && close > open)
    topology.transparent_huge_pages = modes.substr(open + 1, close - open - 1);
  const std::string meminfo = read_text(root + "/proc/meminfo").value_or("");
  topology.huge_page_bytes = number_after(meminfo, "Hugepagesize:") * 1024;
  topology.reserved_huge_pages = number_after(meminfo, "HugePages_Free:");
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  const char* at = text.c_str();
  while (std::isdigit(static_cast<unsigned char>(*at))) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    long last = first;
    if (*end == '-' && std::isdigit(static_cast<unsigned char>(end[1])))
      last = std::strtol(end + 1, &end, 10);
    if (last > 1 << 20) break;
    for (long cpu = first; cpu <= last; ++cpu) cpus.push_back(static_cast<int>(cpu));
    if (*end != ',') break;
    at = end + 1;
  }
  return cpus;
}

std::vector<int> allowed_cpus() {
  // The kernel refuses a mask smaller than its own, so the mask grows until it fits.
  for (int count = CPU_SETSIZE; count <= 1 << 16; count *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(count),
                                                               [](cpu_set_t* s) { CPU_FREE(s); });
    const size_t bytes = CPU_ALLOC_SIZE(count);
    CPU_ZERO_S(bytes, set.get());
    if (sched_getaffinity(0, bytes, set.get()) != 0) continue;
    std::vector<int> cpus;
    for (int cpu = 0; cpu < count; ++cpu)
      if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set.get())) cpus.push_back(cpu);
    return cpus;
  }
  return {0};
}

std::vector<Cpu> worker_cpus(const Topology& topology, size_t count) {
  std::map<std::pair<int, int>, int> seen;  // per node and thread of a core
  struct Ranked {
    int thread, turn;
    Cpu cpu;
  };
  std::vector<Ranked> ranked;
  for (const Cpu& cpu : topology.cpus) ranked.push_back({cpu.thread, seen[{cpu.node, cpu.thread}]++, cpu});
  std::stable_sort(ranked.begin(), ranked.end(), [](const Ranked& a, const Ranked& b) {
    return std::tie(a.thread, a.turn, a.cpu.node) < std::tie(b.thread, b.turn, b.cpu.node);
  });
  if (count < ranked.size()) ranked.resize(count);
  std::vector<Cpu> chosen;
  for (const Ranked& r : ranked) chosen.push_back(r.cpu);
  std::stable_sort(chosen.begin(), chosen.end(), [](const Cpu& a, const Cpu& b) {
    return std::tie(a.node, a.thread, a.cpu) < std::tie(b.node, b.thread, b.cpu);
  });
  return chosen;
}

Topology read_topology(const std::string& root, const std::vector<int>& allowed) {
  Topology topology;
  const std::string cpuinfo = read_text(root + "/proc/cpuinfo").value_or("");
  topology.vendor = value_of(cpuinfo, "vendor_id");
  topology.model_name = value_of(cpuinfo, "model name");
  read_cpus(root, allowed, topology);
  if (!allowed.empty()) read_caches(root, allowed.front(), topology);
  read_numa(root, topology);
  topology.cpu_quota = read_cpu_quota(root);
  auto cores = static_cast<size_t>(
      std::count_if(topology.cpus.begin(), topology.cpus.end(), [](const Cpu& c) { return c.thread == 0; }));
  if (topology.cpu_quota > 0)
    cores = std::min(cores, static_cast<size_t>(std::max(1.0, std::floor(topology.cpu_quota))));
  for (const Cpu& cpu : worker_cpus(topology, cores)) topology.physical_cpus.push_back(cpu.cpu);
  std::sort(topology.physical_cpus.begin(), topology.physical_cpus.end());
  read_huge_pages(root, topology);
  return topology;
}

}  // namespace proa::cpu
