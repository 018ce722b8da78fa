// One expert layer on a pool: GB/s of the distinct experts and GFLOP/s at several numbers of tokens, beside
// the read bandwidth of the same threads; CPU time of all threads too, which a busy machine disturbs less.
// Every expert has the same weights in a place of its own; each call draws new experts.
//
//   cmake -S . -B build/bench -DPROA_BUILD_PYTHON=OFF -DPROA_BUILD_BENCH=ON && cmake --build build/bench
//   build/bench/expert_layer_bench FORMAT [HIDDEN INTERMEDIATE EXPERTS TOP_K THREADS TOKENS...]
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "cpu/topology.h"
#include "gemm/kernel.h"
#include "moe/expert_layer.h"
#include "runtime/read_bandwidth.h"
#include "tests/random_weight.h"

namespace {

using namespace proa;

struct Spec {
  const char* format;
  int64_t hidden = 7168, intermediate = 2048, experts = 16, top_k = 8, threads = 2;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Distinct experts for each token.
std::vector<int32_t> draw_ids(test::Rng& rng, const Spec& spec, int64_t tokens) {
  std::vector<int32_t> all(static_cast<size_t>(spec.experts)), ids;
  std::iota(all.begin(), all.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    std::shuffle(all.begin(), all.end(), rng);
    ids.insert(ids.end(), all.begin(), all.begin() + spec.top_k);
  }
  return ids;
}

void measure(moe::ExpertLayer& layer, const Spec& spec, int64_t tokens) {
  test::Rng rng(7);
  const auto x = test::random_floats(rng, tokens * spec.hidden);
  const std::vector<float> weights(static_cast<size_t>(tokens * spec.top_k), 0.125f);
  std::vector<float> out(x.size());
  std::vector<double> times, cpu_times;
  const int64_t bytes_before = layer.bytes_read();
  int64_t calls = 0;
  for (const auto start = std::chrono::steady_clock::now(); seconds_since(start) < 1.0 || times.size() < 3;) {
    const auto ids = draw_ids(rng, spec, tokens);
    const double cpu_begin = cpu_seconds();
    const auto begin = std::chrono::steady_clock::now();
    layer.forward({x.data(), ids.data(), weights.data(), out.data(), tokens, spec.top_k, false});
    if (++calls == 1) continue;
    times.push_back(seconds_since(begin));
    cpu_times.push_back(cpu_seconds() - cpu_begin);
  }
  const double bytes = static_cast<double>(layer.bytes_read() - bytes_before) / static_cast<double>(calls);
  const double flops = 6.0 * static_cast<double>(tokens * spec.top_k * spec.hidden * spec.intermediate);
  const double wall = median(times), best = *std::min_element(times.begin(), times.end());
  std::printf("%-20s %5ld tokens %9.3f ms %9.3f CPU ms %7.2f GB/s (best %7.2f) %8.1f GFLOP/s\n",
              layer.config().gate_up_kernel->name, static_cast<long>(tokens), wall * 1e3,
              median(cpu_times) * 1e3, bytes / wall / 1e9, bytes / best / 1e9, flops / wall / 1e9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  Spec spec{argv[1]};
  int64_t* fields[] = {&spec.hidden, &spec.intermediate, &spec.experts, &spec.top_k, &spec.threads};
  for (int i = 0; i < 5 && i + 2 < argc; ++i) *fields[i] = std::atoll(argv[i + 2]);
  std::vector<int64_t> tokens;
  for (int i = 7; i < argc; ++i) tokens.push_back(std::atoll(argv[i]));
  if (tokens.empty()) tokens = {1, 4, 16, 64, 256, 1024};

  std::vector<int> cpus = cpu::read_topology("", cpu::allowed_cpus()).physical_cpus;
  cpus.resize(std::min(cpus.size(), static_cast<size_t>(spec.threads)));
  const format::Shape in{spec.intermediate, spec.hidden}, out{spec.hidden, spec.intermediate};
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (format::format_name(kernel->weight) != std::string_view(spec.format)) continue;
    if (!cpu::isa_has(kernel->required_isa) || kernel->reject(in) != nullptr ||
        kernel->reject(out) != nullptr)
      continue;
    runtime::ThreadPool pool(cpus);
    moe::ExpertWorkspace workspace(pool, *std::max_element(tokens.begin(), tokens.end()));
    moe::ExpertLayer layer(workspace,
                           {spec.experts, spec.hidden, spec.intermediate, kernel, kernel, spec.top_k});
    test::Rng rng(1);
    const auto gate = test::random_weight(rng, kernel->weight, in),
               down = test::random_weight(rng, kernel->weight, out);
    for (int64_t e = 0; e < spec.experts; ++e) layer.load(e, gate.raw(), gate.raw(), down.raw());
    for (int64_t n : tokens) measure(layer, spec, n);
    std::printf("read %.1f GB/s\n", runtime::measure_read_bandwidth(cpus, size_t{512} << 20, 8));
    break;
  }
}
