#include "runtime/read_bandwidth.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <future>
#include <span>

#include "cpu/isa.h"

namespace proa::runtime {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kPrefetchAhead = 4096;  // bytes; a hint past the end of the memory does nothing
constexpr size_t kStep = 8 * kLine;  // bytes per loop turn: 8 independent sums hide the latency of the add

// Wide loads by GCC's vector types. Each function is compiled for its own ISA and named, never a shared
// template.
using Vector64 = int64_t __attribute__((vector_size(64)));
using Vector32 = int64_t __attribute__((vector_size(32)));
using Vector16 = int64_t __attribute__((vector_size(16)));

#define PROA_READ_LOOP(Vector)                                                         \
  Vector sums[8] = {};                                                                 \
  for (size_t at = 0; at + kStep <= bytes; at += kStep) {                              \
    for (size_t line = 0; line < 8; ++line) {                                          \
      __builtin_prefetch(data + at + kPrefetchAhead + line * kLine);                   \
      const auto* vectors = reinterpret_cast<const Vector*>(data + at + line * kLine); \
      for (size_t i = 0; i < kLine / sizeof(Vector); ++i) sums[line] += vectors[i];    \
    }                                                                                  \
  }                                                                                    \
  for (int line = 1; line < 8; ++line) sums[0] += sums[line];                          \
  return sums[0][0]

__attribute__((target("avx512f"))) int64_t read_avx512(const std::byte* data, size_t bytes) noexcept {
  PROA_READ_LOOP(Vector64);
}
__attribute__((target("avx2"))) int64_t read_avx2(const std::byte* data, size_t bytes) noexcept {
  PROA_READ_LOOP(Vector32);
}
int64_t read_baseline(const std::byte* data, size_t bytes) noexcept { PROA_READ_LOOP(Vector16); }

#undef PROA_READ_LOOP

using ReadFunction = int64_t (*)(const std::byte*, size_t) noexcept;

ReadFunction choose_read() {
  if (cpu::isa_has(cpu::kAvx512Tier)) return read_avx512;
  if (cpu::isa_has(cpu::kAvx2Tier)) return read_avx2;
  return read_baseline;
}

}  // namespace

ReadProbe::ReadProbe(const std::vector<int>& cpus, size_t bytes)
    : first_cpu_(cpus.front()),
      pool_(cpus),
      share_(std::max<size_t>(1, bytes / cpus.size() / kStep) * kStep),
      arena_(share_ * cpus.size()),
      memory_(arena_.take<std::byte>(share_ * cpus.size())) {
  on_first_cpu([&] { pool_.parallel([&](int thread, int) { std::memset(slice(thread), 1, share_); }); });
}

double ReadProbe::measure() {
  const ReadFunction read = choose_read();
  std::atomic<int64_t> sink{0};  // keeps the reads alive
  double rate = 0.0;
  on_first_cpu([&] {
    const auto start = std::chrono::steady_clock::now();
    pool_.parallel(
        [&](int thread, int) { sink.fetch_add(read(slice(thread), share_), std::memory_order_relaxed); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    rate = static_cast<double>(memory_.size()) / seconds.count() / 1e9;
  });
  return rate;
}

// A pool leaves its caller unpinned: here the caller is a thread of its own, so that it can be pinned.
template <class F>
void ReadProbe::on_first_cpu(F&& work) {
  std::async(std::launch::async, [&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(first_cpu_), &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    work();
  }).get();
}

double measure_read_bandwidth(const std::vector<int>& cpus, size_t bytes, int repeats) {
  ReadProbe probe(cpus, bytes);
  double best = 0.0;
  for (int repeat = 0; repeat < repeats; ++repeat) best = std::max(best, probe.measure());
  return best;
}

}  // namespace proa::runtime
