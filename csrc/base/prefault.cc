#include "base/prefault.h"

#include <sys/mman.h>

#include <algorithm>

namespace proa::base {
namespace {

constexpr size_t kPieceBytes = size_t{16} << 20;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE: glibc has it since 2.35

}  // namespace

Prefault::Prefault(std::vector<std::span<std::byte>> ranges, int num_threads) {
  for (std::span<std::byte> range : ranges)
    for (; !range.empty(); range = range.subspan(pieces_.back().size()))
      pieces_.push_back(range.first(std::min(range.size(), kPieceBytes)));
  try {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (...) {
    stopped_ = true;
    wait();
    throw;
  }
}

Prefault::~Prefault() {
  stopped_ = true;
  wait();
}

void Prefault::wait() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Prefault::run() noexcept {
  while (!stopped_) {
    const size_t i = next_++;
    if (i >= pieces_.size()) return;
    if (madvise(pieces_[i].data(), pieces_[i].size(), kPopulateWrite) != 0) return;
  }
}

}  // namespace proa::base
