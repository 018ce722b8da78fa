// XXH64, the checksum of converted experts (xxHash specification, "XXH64 algorithm description").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace proa::base {

// Of all bytes, seed 0: what `xxhsum -H64` prints.
uint64_t xxh64(std::span<const std::byte> bytes) noexcept;

}  // namespace proa::base
