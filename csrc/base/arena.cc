#include "base/arena.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <new>
#include <utility>

namespace proa::base {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Preferred, not bound: a full node then costs speed, not the process. Refused where the node does not exist
// or a cpuset keeps the process off it; the memory is then placed as without.
void prefer_node(void* start, size_t bytes, int node) noexcept {
  constexpr size_t kBits = 8 * sizeof(unsigned long), kMaxNodes = 1024;
  if (node < 0 || static_cast<size_t>(node) >= kMaxNodes) return;
  std::array<unsigned long, kMaxNodes / kBits> mask{};
  mask[static_cast<size_t>(node) / kBits] = 1UL << (static_cast<size_t>(node) % kBits);
  syscall(SYS_mbind, start, bytes, MPOL_PREFERRED, mask.data(), kMaxNodes + 1, 0);
}

}  // namespace

Arena::Arena(size_t bytes, int node) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  capacity_ = padded(bytes);
  const bool huge = capacity_ >= kHugePage;
  mapping_bytes_ = capacity_ + (huge ? kHugePage : 0);  // room to start on a huge page boundary
  mapping_ = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  uintptr_t start = reinterpret_cast<uintptr_t>(mapping_);
  if (huge) {
    start = (start + kHugePage - 1) / kHugePage * kHugePage;
    // Advice only: without transparent huge pages the arena works on 4 KiB pages.
    madvise(reinterpret_cast<void*>(start), capacity_, MADV_HUGEPAGE);
  }
  data_ = reinterpret_cast<std::byte*>(start);
  prefer_node(mapping_, mapping_bytes_, node);
}

Arena::~Arena() { release(); }

Arena::Arena(Arena&& other) noexcept { *this = std::move(other); }

Arena& Arena::operator=(Arena&& other) noexcept {
  if (this == &other) return *this;
  release();
  data_ = std::exchange(other.data_, nullptr);
  capacity_ = std::exchange(other.capacity_, 0);
  used_ = std::exchange(other.used_, 0);
  mapping_ = std::exchange(other.mapping_, nullptr);
  mapping_bytes_ = std::exchange(other.mapping_bytes_, 0);
  return *this;
}

std::byte* Arena::take_bytes(size_t count, size_t element_bytes) {
  const size_t left = capacity_ - used_;
  if (count > left / element_bytes) throw std::bad_alloc();
  std::byte* start = data_ + used_;
  used_ += padded(count * element_bytes);  // capacity is padded too, so this cannot pass it
  return start;
}

void Arena::release() noexcept {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
  mapping_ = nullptr;
}

}  // namespace proa::base
