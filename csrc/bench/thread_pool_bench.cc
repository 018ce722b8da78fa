// What a fork/join costs, back to back and after pauses, and the CPU time of a pool that has nothing to do.
//
//   cmake -S . -B build/bench -DPROA_BUILD_PYTHON=OFF -DPROA_BUILD_BENCH=ON && cmake --build build/bench
//   build/bench/thread_pool_bench [THREADS...]        default: one per core
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "cpu/topology.h"
#include "runtime/thread_pool.h"

namespace {

using namespace proa;
using Clock = std::chrono::steady_clock;

// User and system time of the process in seconds, as /proc/self/stat counts it.
double process_seconds() {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const char* at = text.c_str() + text.rfind(')') + 1;  // behind the name, which may hold anything
  char* end = nullptr;
  double ticks = 0;
  for (int field = 3; field <= 15; ++field) {
    while (*at == ' ') ++at;
    if (field >= 14) ticks += std::strtod(at, &end);
    while (*at != ' ') ++at;
  }
  return ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

struct Latency {
  double median, p99;  // microseconds
};

template <class Call>
Latency measure(std::chrono::microseconds pause, Call call) {
  std::vector<double> times;
  const auto begin = Clock::now();
  while (times.size() < 100 || (times.size() < 20000 && Clock::now() - begin < std::chrono::seconds(1))) {
    const auto resume = Clock::now() + pause;
    if (pause >= std::chrono::milliseconds(1)) std::this_thread::sleep_for(pause);
    while (Clock::now() < resume) {
    }
    const auto start = Clock::now();
    call();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() * 99 / 100]};
}

void measure_pool(int threads) {
  const cpu::Topology topology = cpu::read_topology("", cpu::allowed_cpus());
  std::vector<int> cpus, nodes;
  for (const cpu::Cpu& cpu : cpu::worker_cpus(topology, static_cast<size_t>(threads))) {
    cpus.push_back(cpu.cpu);
    nodes.push_back(cpu.node);
  }
  runtime::ThreadPool pool(cpus, nodes);
  for (int us : {0, 10, 50, 200, 5000}) {
    const auto pause = std::chrono::microseconds(us);
    const Latency all = measure(pause, [&] { pool.parallel([](int, int) {}); });
    const Latency shared =
        measure(pause, [&] { pool.parallel_for(4 * threads, 1, [](int64_t, int64_t, int) {}); });
    std::printf(
        "%3d threads, %4d us after the last call: all run %7.2f us (99 %%: %7.2f), shared %7.2f us (%7.2f)\n",
        pool.num_threads(), us, all.median, all.p99, shared.median, shared.p99);
  }
  std::this_thread::sleep_for(std::chrono::seconds(1));
  const double before = process_seconds();
  std::this_thread::sleep_for(std::chrono::seconds(2));
  std::printf("%3d threads, idle for a second: %.1f %% of a CPU\n", pool.num_threads(),
              (process_seconds() - before) / 2 * 100);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> threads;
  for (int i = 1; i < argc; ++i) threads.push_back(std::atoi(argv[i]));
  if (threads.empty())
    threads.push_back(static_cast<int>(cpu::read_topology("", cpu::allowed_cpus()).physical_cpus.size()));
  for (int n : threads) measure_pool(n);
}
