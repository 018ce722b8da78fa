// One linear per thread: GB/s of packed weight and GFLOP/s of every kernel this CPU can run, per thread, by
// thread CPU time, so that a busy machine disturbs it little; beside them the read bandwidth and the matrix
// rate of the same threads, measured before and after. The weights rotate through copies larger than the
// caches.
//
//   cmake -S . -B build/bench -DPROA_BUILD_PYTHON=OFF -DPROA_BUILD_BENCH=ON && cmake --build build/bench
//   build/bench/gemm_bench [--shape OUT IN] [--format F] [--kernel K] [--tokens 1,16,256] [--threads N]
//                          [--rows R] [--seconds S] [--quantile Q] [--fine P]
//
// Default: 2048 7168, all formats and kernels (K is a prefix), 1 to 256 tokens, one thread, calls of 256
// rows. --fine: the part of the groups of int8 activations that have two planes. With several threads all run
// at once, each with weights of its own: `--threads 1` beside `--threads 2` shows whether two CPUs are one
// core.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/arena.h"
#include "bench/matrix_peak.h"
#include "cpu/isa.h"
#include "cpu/topology.h"
#include "format/format_info.h"
#include "gemm/act_budget.h"
#include "gemm/act_format.h"
#include "gemm/kernel.h"
#include "runtime/thread_pool.h"

namespace {

using namespace proa;

constexpr int64_t kCopiesBytes = int64_t{192} << 20;
constexpr size_t kReadBytes = size_t{256} << 20;

struct Options {
  format::Shape shape{2048, 7168};
  std::string format, kernel;
  std::vector<int64_t> tokens{1, 2, 4, 8, 12, 16, 32, 64, 256};
  int threads = 1;
  int64_t rows = 256;
  double seconds = 0.5;
  double quantile = 0.5;
  double fine = 0.0;
};

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double quantile(std::vector<double> values, double q) {
  const auto at = values.begin() + static_cast<int64_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

// Bytes without meaning that are normal numbers in every format: subnormal operands would slow the arithmetic
// down.
std::vector<std::byte> random_weight(format::WeightFormat weight, const format::Shape& shape) {
  std::vector<std::byte> bytes(static_cast<size_t>(format::packed_bytes(weight, shape)));
  uint32_t state = 1;
  for (std::byte& byte : bytes)
    byte = static_cast<std::byte>(0x20 | (((state = state * 1664525u + 1013904223u) >> 24) & 0x1f));
  return bytes;
}

// One thread's weights and activations.
class Work {
 public:
  Work(const gemm::Kernel& kernel, const Options& options, int64_t tokens)
      : kernel_(kernel),
        shape_(options.shape),
        panels_(std::max<int64_t>(1, options.rows / format::kPanelRows)),
        tokens_(tokens) {
    const std::vector<std::byte> weight = random_weight(kernel.weight, shape_);
    bytes_ = static_cast<int64_t>(base::Arena::padded(weight.size()));
    copies_ = tokens > 16 ? 1 : std::max<int64_t>(1, kCopiesBytes / bytes_);
    const int64_t row_bytes = kernel.quantize == nullptr
                                  ? 4 * shape_.in_features
                                  : gemm::act_row_bytes(kernel.act, shape_.in_features);
    const auto act_bytes = base::Arena::padded(static_cast<size_t>(tokens * row_bytes));
    arena_ = base::Arena(static_cast<size_t>(copies_ * bytes_) + act_bytes);
    memory_ = arena_.take<std::byte>(static_cast<size_t>(copies_ * bytes_));
    for (int64_t i = 0; i < copies_; ++i)
      std::memcpy(memory_.data() + i * bytes_, weight.data(), weight.size());
    std::byte* rows = arena_.take<std::byte>(act_bytes).data();
    const std::vector<float> x(static_cast<size_t>(shape_.in_features), 0.5f);
    for (int64_t t = 0; t < tokens; ++t) {
      if (kernel.quantize == nullptr)
        std::memcpy(rows + t * row_bytes, x.data(), static_cast<size_t>(row_bytes));
      else
        quantize(x.data(), options.fine, rows + t * row_bytes);
    }
    rows_ = {rows, row_bytes, nullptr};
    out_.resize(static_cast<size_t>(tokens * shape_.out_features));
  }

  // Groups get two planes at random.
  void quantize(const float* x, double fine, std::byte* row) {
    const int64_t in = shape_.in_features, group = gemm::act_group(kernel_.act);
    for (int64_t k = 0; k < in; k += group)
      kernel_.quantize(x + k, k, std::min(group, in - k), in,
                       draw_(rng_) < fine ? gemm::kAllFine : std::numeric_limits<float>::infinity(), row);
  }

  // CPU seconds of a call.
  double run(double seconds, double q) {
    call(0);
    std::vector<double> times;
    for (double end = cpu_seconds() + seconds; cpu_seconds() < end || times.size() < 3;) {
      const double start = cpu_seconds();
      call(static_cast<int64_t>(times.size() + 1) % copies_);
      times.push_back(cpu_seconds() - start);
    }
    return quantile(times, q);
  }

 private:
  void call(int64_t copy) {
    for (int64_t panel = 0; panel < shape_.panels(); panel += panels_)
      kernel_.gemm({memory_.data() + copy * bytes_, shape_, panel, std::min(panel + panels_, shape_.panels()),
                    rows_, tokens_, out_.data() + panel * format::kPanelRows, shape_.out_features});
  }

  const gemm::Kernel& kernel_;
  format::Shape shape_;
  int64_t panels_, tokens_;
  int64_t bytes_ = 0, copies_ = 0;
  std::mt19937 rng_{1};
  std::uniform_real_distribution<double> draw_;
  base::Arena arena_;
  std::span<std::byte> memory_;
  gemm::ActRows rows_;
  std::vector<float> out_;
};

// What the threads can do at most, each: bytes and operations per second.
struct Limits {
  double read = 0.0, int8 = 0.0, bf16 = 0.0;
};

double matrix_rate(runtime::ThreadPool& pool, bench::Products products) {
  if (!cpu::isa_has(bench::kPeakIsa)) return 0.0;
  constexpr int64_t kRounds = 100'000;
  std::vector<double> seconds(static_cast<size_t>(pool.num_threads()));
  pool.parallel([&](int thread, int) {
    std::vector<double> times;
    for (int i = 0; i < 7; ++i) {
      const double start = cpu_seconds();
      bench::run_products(products, kRounds);
      times.push_back(cpu_seconds() - start);
    }
    seconds[static_cast<size_t>(thread)] = median(times);
  });
  return bench::round_operations(products) * kRounds / median(seconds);
}

// By CPU time as the cells are, unlike runtime::measure_read_bandwidth.
double read_rate(runtime::ThreadPool& pool) {
  std::vector<double> seconds(static_cast<size_t>(pool.num_threads()));
  pool.parallel([&](int thread, int) {
    base::Arena arena(kReadBytes);
    const std::span<uint64_t> words = arena.take<uint64_t>(kReadBytes / 8);
    std::fill(words.begin(), words.end(), 1);
    std::vector<double> times;
    for (int i = 0; i < 5; ++i) {
      const double start = cpu_seconds();
      uint64_t sum[4] = {};
      for (size_t k = 0; k < words.size(); k += 4)
        for (size_t j = 0; j < 4; ++j) sum[j] += words[k + j];
      times.push_back(cpu_seconds() - start);
      words[0] = sum[0] + sum[1] + sum[2] + sum[3];
    }
    seconds[static_cast<size_t>(thread)] = median(times);
  });
  return static_cast<double>(kReadBytes) / median(seconds);
}

Limits measure_limits(runtime::ThreadPool& pool) {
  const Limits limits{read_rate(pool), matrix_rate(pool, bench::Products::kInt8Columns64),
                      matrix_rate(pool, bench::Products::kBf16)};
  std::printf("per thread, %d threads: read %.1f GB/s, matrix int8 %.2f, bf16 %.2f TFLOP/s\n",
              pool.num_threads(), limits.read / 1e9, limits.int8 / 1e12, limits.bf16 / 1e12);
  return limits;
}

void measure(runtime::ThreadPool& pool, const Limits& limits, const gemm::Kernel& kernel,
             const Options& options, int64_t tokens) {
  std::vector<double> seconds(static_cast<size_t>(pool.num_threads()));
  pool.parallel([&](int thread, int) {
    seconds[static_cast<size_t>(thread)] =
        Work(kernel, options, tokens).run(options.seconds, options.quantile);
  });
  const double time = median(seconds);
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  const double bytes = static_cast<double>(format::packed_bytes(kernel.weight, options.shape));
  const double flops =
      2.0 * static_cast<double>(tokens * options.shape.out_features * options.shape.in_features);
  const double peak = gemm::is_int8(kernel.act) ? limits.int8 : limits.bf16;
  std::printf("%-20s %5ld tokens %9.3f ms %7.2f GB/s %4.2f of read %8.1f GFLOP/s", kernel.name,
              static_cast<long>(tokens), time * 1e3, bytes / time / 1e9, bytes / time / limits.read,
              flops / time / 1e9);
  if (peak > 0.0) std::printf(" %5.3f of matrix", flops / time / peak);
  if (pool.num_threads() > 1) std::printf(", threads %.3f to %.3f ms", *least * 1e3, *most * 1e3);
  std::printf("\n");
  std::fflush(stdout);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    const auto next = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--shape") {
      options.shape.out_features = std::atoll(next());
      options.shape.in_features = std::atoll(next());
    } else if (name == "--format") {
      options.format = next();
    } else if (name == "--kernel") {
      options.kernel = next();
    } else if (name == "--tokens") {
      options.tokens.clear();
      for (const char* p = next(); *p != '\0';) {
        char* end;
        options.tokens.push_back(std::strtoll(p, &end, 10));
        p = *end == ',' ? end + 1 : "";
      }
    } else if (name == "--threads") {
      options.threads = std::max(1, std::atoi(next()));
    } else if (name == "--rows") {
      options.rows = std::atoll(next());
    } else if (name == "--seconds") {
      options.seconds = std::atof(next());
    } else if (name == "--fine") {
      options.fine = std::atof(next());
    } else if (name == "--quantile") {
      options.quantile = std::clamp(std::atof(next()), 0.0, 1.0);
    } else {
      std::fprintf(stderr, "gemm_bench: unknown option %s\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  std::vector<int> cpus = cpu::allowed_cpus();
  cpus.resize(std::min(cpus.size(), static_cast<size_t>(options.threads)));
  runtime::ThreadPool pool(cpus);
  const Limits limits = measure_limits(pool);
  for (const gemm::Kernel* kernel : gemm::all_kernels()) {
    if (!cpu::isa_has(kernel->required_isa) || kernel->reject(options.shape) != nullptr) continue;
    if (!options.format.empty() && format::format_name(kernel->weight) != options.format) continue;
    if (!std::string_view(kernel->name).starts_with(options.kernel)) continue;
    for (int64_t tokens : options.tokens)
      if (kernel->required_isa != 0 || tokens <= 2) measure(pool, limits, *kernel, options, tokens);
  }
  measure_limits(pool);
}
