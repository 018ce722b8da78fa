// One thread, one linear: GB/s of packed weight and GFLOP/s of every kernel this CPU can run, by thread CPU
// time, so that a busy machine disturbs it little. The weights rotate through copies larger than the caches.
//
//   cmake -S . -B build/bench -DPROA_BUILD_PYTHON=OFF -DPROA_BUILD_BENCH=ON && cmake --build build/bench
//   build/bench/gemm_bench [OUT IN [FORMAT]]          default 2048 7168, all formats
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/arena.h"
#include "cpu/isa.h"
#include "gemm/act_format.h"
#include "gemm/kernel.h"

namespace {

using namespace proa;

constexpr int64_t kCopiesBytes = int64_t{192} << 20;
constexpr int64_t kPanels = 16;  // of one call

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Bytes without meaning that are normal numbers in every format: subnormal operands would slow the arithmetic
// down.
std::vector<std::byte> random_weight(format::WeightFormat weight, const format::Shape& shape) {
  std::vector<std::byte> bytes(static_cast<size_t>(format::packed_bytes(weight, shape)));
  uint32_t state = 1;
  for (std::byte& byte : bytes)
    byte = static_cast<std::byte>(0x20 | (((state = state * 1664525u + 1013904223u) >> 24) & 0x1f));
  return bytes;
}

void measure(const gemm::Kernel& kernel, const format::Shape& shape, int64_t tokens) {
  const std::vector<std::byte> weight = random_weight(kernel.weight, shape);
  const auto bytes = static_cast<int64_t>(base::Arena::padded(weight.size()));
  const int64_t copies = tokens > 16 ? 1 : std::max<int64_t>(1, kCopiesBytes / bytes);
  base::Arena arena(static_cast<size_t>(copies * bytes));
  const std::span<std::byte> memory = arena.take<std::byte>(static_cast<size_t>(copies * bytes));
  for (int64_t i = 0; i < copies; ++i) std::memcpy(memory.data() + i * bytes, weight.data(), weight.size());

  std::vector<float> x(static_cast<size_t>(tokens * shape.in_features), 0.5f);
  gemm::ActRows rows{reinterpret_cast<const std::byte*>(x.data()), 4 * shape.in_features, nullptr};
  std::vector<std::byte> quantized;
  if (kernel.quantize != nullptr) {
    const int64_t row_bytes = gemm::act_row_bytes(kernel.act, shape.in_features);
    quantized.resize(static_cast<size_t>(tokens * row_bytes));
    for (int64_t t = 0; t < tokens; ++t)
      kernel.quantize(x.data() + t * shape.in_features, 0, shape.in_features, shape.in_features,
                      quantized.data() + t * row_bytes);
    rows = {quantized.data(), row_bytes, nullptr};
  }
  std::vector<float> out(static_cast<size_t>(tokens * shape.out_features));
  const auto call = [&](int64_t copy) {
    for (int64_t panel = 0; panel < shape.panels(); panel += kPanels)
      kernel.gemm({memory.data() + copy * bytes, shape, panel, std::min(panel + kPanels, shape.panels()),
                   rows, tokens, out.data() + panel * format::kPanelRows, shape.out_features});
  };
  call(0);
  std::vector<double> times;
  for (double end = cpu_seconds() + 0.5; cpu_seconds() < end || times.size() < 3;) {
    const double start = cpu_seconds();
    call(static_cast<int64_t>(times.size() + 1) % copies);
    times.push_back(cpu_seconds() - start);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<int64_t>(times.size() / 2), times.end());
  const double seconds = times[times.size() / 2];
  const double flops = 2.0 * static_cast<double>(tokens * shape.out_features * shape.in_features);
  std::printf("%-20s %6ld tokens %9.3f ms %7.2f GB/s %8.1f GFLOP/s\n", kernel.name, static_cast<long>(tokens),
              seconds * 1e3, static_cast<double>(weight.size()) / seconds / 1e9, flops / seconds / 1e9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  format::Shape shape{2048, 7168};
  if (argc > 2) shape = {std::atoll(argv[1]), std::atoll(argv[2])};
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (!cpu::isa_has(kernel->required_isa) || kernel->reject(shape) != nullptr) continue;
    if (argc > 3 && format::format_name(kernel->weight) != std::string_view(argv[3])) continue;
    for (int64_t tokens : {1, 2, 4, 8, 12, 16, 32, 64, 256})
      if (kernel->required_isa != 0 || tokens <= 2) measure(*kernel, shape, tokens);
  }
}
