// How fast the memory of this machine can be read: the floor for decoding.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/arena.h"
#include "runtime/thread_pool.h"

namespace proa::runtime {

// Memory that one pinned thread per CPU reads through, each the part it wrote first (so from its own NUMA
// node). Make it several times as large as the caches. `cpus` is not empty and holds ids below CPU_SETSIZE.
// Throws std::bad_alloc, std::system_error.
class ReadProbe {
 public:
  ReadProbe(const std::vector<int>& cpus, size_t bytes);
  // Reads all of it once: 10^9 bytes per second.
  double measure();

 private:
  template <class F>
  void on_first_cpu(F&& work);
  std::byte* slice(int thread) const noexcept {
    return memory_.data() + static_cast<size_t>(thread) * share_;
  }

  int first_cpu_;
  ThreadPool pool_;
  size_t share_;
  base::Arena arena_;
  std::span<std::byte> memory_;
};

// The best of `repeats` passes over a probe of `bytes`.
double measure_read_bandwidth(const std::vector<int>& cpus, size_t bytes, int repeats = 5);

}  // namespace proa::runtime
