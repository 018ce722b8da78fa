// Memory that is about to be written for the first time, taken from the system beforehand.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

namespace proa::base {

// The system clears a page when it is first touched, which costs more than filling it. These threads make it
// do so, in the order of the ranges, while whoever fills the pages waits for a disk. Pages keep what was
// written to them, and NUMA policies hold. Where the system cannot do it (before Linux 5.14), nothing
// happens.
class Prefault {
 public:
  // Ranges start and end at page boundaries and outlive this. Throws std::system_error.
  Prefault(std::vector<std::span<std::byte>> ranges, int num_threads);
  // Stops early, after the pieces at work.
  ~Prefault();
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;

  // Until all ranges are there.
  void wait();

 private:
  void run() noexcept;

  std::vector<std::span<std::byte>> pieces_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stopped_{false};
  std::vector<std::thread> threads_;
};

}  // namespace proa::base
