#include "base/xxh64.h"

#include <bit>
#include <cstring>

namespace proa::base {
namespace {

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87u, kPrime2 = 0xc2b2ae3d27d4eb4fu,
                   kPrime3 = 0x165667b19e3779f9u, kPrime4 = 0x85ebca77c2b2ae63u,
                   kPrime5 = 0x27d4eb2f165667c5u;

// Little-endian, as x86-64 is.
template <class T>
uint64_t read(const std::byte* bytes) noexcept {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

constexpr uint64_t mix_lane(uint64_t lane, uint64_t input) noexcept {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

constexpr uint64_t merge_lane(uint64_t hash, uint64_t lane) noexcept {
  return (hash ^ mix_lane(0, lane)) * kPrime1 + kPrime4;
}

// Stripes of 32 bytes go to four lanes; moves `bytes` behind the last whole one.
uint64_t hash_stripes(const std::byte*& bytes, const std::byte* end) noexcept {
  uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = uint64_t{0} - kPrime1;
  for (; end - bytes >= 32; bytes += 32) {
    a = mix_lane(a, read<uint64_t>(bytes));
    b = mix_lane(b, read<uint64_t>(bytes + 8));
    c = mix_lane(c, read<uint64_t>(bytes + 16));
    d = mix_lane(d, read<uint64_t>(bytes + 24));
  }
  uint64_t hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
  for (const uint64_t lane : {a, b, c, d}) hash = merge_lane(hash, lane);
  return hash;
}

}  // namespace

uint64_t xxh64(std::span<const std::byte> input) noexcept {
  const std::byte* bytes = input.data();
  const std::byte* end = bytes + input.size();
  uint64_t hash = input.size() < 32 ? kPrime5 : hash_stripes(bytes, end);
  hash += input.size();
  for (; end - bytes >= 8; bytes += 8)
    hash = std::rotl(hash ^ mix_lane(0, read<uint64_t>(bytes)), 27) * kPrime1 + kPrime4;
  if (end - bytes >= 4) {
    hash = std::rotl(hash ^ read<uint32_t>(bytes) * kPrime1, 23) * kPrime2 + kPrime3;
    bytes += 4;
  }
  for (; bytes != end; ++bytes) hash = std::rotl(hash ^ read<uint8_t>(bytes) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace proa::base
