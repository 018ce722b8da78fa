// The matrix rate of this machine: tile products on registers alone, one thread per core. Prints nothing on a
// CPU without AMX.
//
//   build/bench/matrix_peak_bench [THREADS]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "bench/matrix_peak.h"
#include "cpu/topology.h"
#include "runtime/thread_pool.h"

namespace {

using namespace proa;

constexpr int64_t kRounds = 2'000'000;

void measure(runtime::ThreadPool& pool, const char* name, bench::Products products) {
  double best = 0.0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel([&](int, int) { bench::run_products(products, kRounds); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const double ops = bench::round_operations(products) * static_cast<double>(kRounds * pool.num_threads());
    best = std::max(best, ops / seconds.count() / 1e12);
  }
  std::printf("%-24s %2d threads %8.2f Top/s\n", name, pool.num_threads(), best);
}

}  // namespace

int main(int argc, char** argv) {
  if (!cpu::isa_has(bench::kPeakIsa)) return 0;
  std::vector<int> cpus = cpu::read_topology("", cpu::allowed_cpus()).physical_cpus;
  if (argc > 1) cpus.resize(std::min(cpus.size(), static_cast<size_t>(std::max(1, std::atoi(argv[1])))));
  runtime::ThreadPool pool(cpus);
  measure(pool, "int8, 64 columns", bench::Products::kInt8Columns64);
  measure(pool, "int8, 32 columns", bench::Products::kInt8Columns32);
  measure(pool, "bf16, 32 columns", bench::Products::kBf16);
}
