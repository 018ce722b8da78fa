// One block of 64-byte-aligned memory, allocated once and handed out as spans.
#pragma once

#include <cstddef>
#include <span>

namespace proa::base {

// Backed by huge pages when it is large enough and the system offers them (madvise). Memory starts zeroed and
// is not resident until touched, so without a node the thread that first writes a page decides where it is.
class Arena {
 public:
  static constexpr size_t kAlignment = 64;

  Arena() noexcept = default;
  // On NUMA node `node` while that has room; anywhere when it is negative or the system refuses. Throws
  // std::bad_alloc.
  explicit Arena(size_t bytes, int node = -1);
  ~Arena();
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  static constexpr size_t padded(size_t bytes) noexcept {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  // The next `count` elements, 64-byte aligned: each span takes padded(count * sizeof(T)) bytes.
  // Throws std::bad_alloc when the arena is exhausted. Valid for the life of the arena, also after a move of
  // it.
  template <class T>
  std::span<T> take(size_t count) {
    return {reinterpret_cast<T*>(take_bytes(count, sizeof(T))), count};
  }

  size_t capacity() const noexcept { return capacity_; }
  size_t used() const noexcept { return used_; }

 private:
  std::byte* take_bytes(size_t count, size_t element_bytes);
  void release() noexcept;

  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
};

}  // namespace proa::base
