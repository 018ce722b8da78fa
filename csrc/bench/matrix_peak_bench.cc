// The matrix rate of this machine: tile products on registers alone, one thread per core. The ceiling for the
// AMX cells; prints nothing on a CPU without AMX.
//
//   build/bench/matrix_peak_bench [THREADS]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cpu/isa.h"
#include "cpu/topology.h"
#include "gemm/amx/tile.h"
#include "runtime/thread_pool.h"

namespace {

using namespace proa;
using namespace proa::gemm::amx;

constexpr int64_t kRounds = 2'000'000;

// Four accumulators hide the latency of a product.
void int8_round() {
  tile_dot_int8<0, 4, 6>();
  tile_dot_int8<1, 4, 7>();
  tile_dot_int8<2, 5, 6>();
  tile_dot_int8<3, 5, 7>();
}

void bf16_round() {
  tile_dot_bf16<0, 4, 6>();
  tile_dot_bf16<1, 4, 7>();
  tile_dot_bf16<2, 5, 6>();
  tile_dot_bf16<3, 5, 7>();
}

// `depth` is the number of columns of an activation tile.
void measure(runtime::ThreadPool& pool, const char* name, void (*round)(), int64_t depth,
             int64_t depth_bytes) {
  double best = 0.0;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel([&](int, int) {
      TileConfig config;
      for (int tile = 0; tile < 6; ++tile)
        config.set(tile, kTileRows, tile < 4 ? kTileRowBytes : depth_bytes);
      for (int tile = 6; tile < kTiles; ++tile) config.set(tile, depth_bytes / 4, kTileRowBytes);
      config.load();
      const TileRelease release;
      for (int64_t i = 0; i < kRounds; ++i) round();
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const double ops = 2.0 * 4 * 16 * 16 * static_cast<double>(depth * kRounds * pool.num_threads());
    best = std::max(best, ops / seconds.count() / 1e12);
  }
  std::printf("%-24s %2d threads %8.2f Top/s\n", name, pool.num_threads(), best);
}

}  // namespace

int main(int argc, char** argv) {
  if (!cpu::isa_has(cpu::kAmxTier | cpu::kAmxBf16)) return 0;
  std::vector<int> cpus = cpu::read_topology("", cpu::allowed_cpus()).physical_cpus;
  if (argc > 1) cpus.resize(std::min(cpus.size(), static_cast<size_t>(std::max(1, std::atoi(argv[1])))));
  runtime::ThreadPool pool(cpus);
  measure(pool, "int8, 64 columns", int8_round, 64, 64);
  measure(pool, "int8, 32 columns", int8_round, 32, 32);
  measure(pool, "bf16, 32 columns", bf16_round, 32, 64);
}
