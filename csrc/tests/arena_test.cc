#include "base/arena.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "base/prefault.h"
#include "tests/check.h"

namespace {

using proa::base::Arena;

void hands_out_aligned_zeroed_spans() {
  Arena arena(Arena::padded(3) + Arena::padded(5 * sizeof(float)));
  const auto bytes = arena.take<uint8_t>(3);
  const auto floats = arena.take<float>(5);
  CHECK_EQ(bytes.size(), 3u);
  CHECK_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % Arena::kAlignment, 0u);
  CHECK_EQ(reinterpret_cast<uintptr_t>(floats.data()) % Arena::kAlignment, 0u);
  CHECK_EQ(arena.used(), arena.capacity());
  for (float& value : floats) {
    CHECK_EQ(value, 0.0f);
    value = 1;
  }
  CHECK_EQ(bytes[2], 0);
}

template <class F>
bool refuses(F f) {
  try {
    f();
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

void refuses_what_does_not_fit() {
  Arena arena(64);
  CHECK(refuses([&] { arena.take<float>(17); }));
  CHECK(refuses([&] { arena.take<float>(SIZE_MAX / 4 + 2); }));  // count * size would wrap around
  CHECK_EQ(arena.take<float>(16).size(), 16u);
  CHECK(refuses([&] { arena.take<uint8_t>(1); }));
  CHECK(refuses([] { Arena huge(SIZE_MAX); }));
  CHECK(refuses([] { Arena huge(size_t{1} << 60); }));
  Arena empty(0);
  CHECK_EQ(empty.take<float>(0).size(), 0u);
}

void spans_outlive_a_move() {
  Arena first(size_t{5} << 20);  // large enough for huge pages
  const auto floats = first.take<float>(size_t{1} << 20);
  floats.back() = 7;
  Arena second(64);
  second = std::move(first);
  CHECK_EQ(floats.back(), 7.0f);
  CHECK_EQ(second.used(), size_t{4} << 20);
  CHECK_EQ(first.capacity(), 0u);
}

// Also nodes that this machine lacks, or may not use.
void nodes_are_a_wish() {
  for (int node : {0, 1, 63, 1023, 1024, 1 << 30}) {
    Arena arena(size_t{3} << 20, node);
    const auto bytes = arena.take<uint8_t>(size_t{3} << 20);
    bytes.front() = bytes.back() = 1;
    CHECK_EQ(bytes[1], 0);
  }
}

// Nobody touches the pages, and what was written beforehand stays.
void memory_comes_before_its_use() {
  constexpr size_t kBytes = size_t{40} << 20, kPage = 4096;
  Arena arena(kBytes);
  const auto bytes = arena.take<std::byte>(kBytes);
  bytes[kPage] = std::byte{5};
  {
    proa::base::Prefault prefault({bytes.first(kBytes / 2), bytes.subspan(kBytes / 2)}, 3);
    prefault.wait();
  }
  std::vector<unsigned char> resident(kBytes / kPage);
  CHECK_EQ(mincore(bytes.data(), kBytes, resident.data()), 0);
  for (unsigned char page : resident) CHECK_EQ(page & 1, 1);
  CHECK(bytes[kPage] == std::byte{5});
  CHECK(bytes[kBytes - 1] == std::byte{0});
  const proa::base::Prefault stopped({bytes}, 2);  // may end before it began
}

}  // namespace

int main() {
  memory_comes_before_its_use();
  nodes_are_a_wish();
  hands_out_aligned_zeroed_spans();
  refuses_what_does_not_fit();
  spans_outlive_a_move();
  return proa::test::result();
}
