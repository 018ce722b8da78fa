// The tile instructions, as assembly: the intrinsics of GCC 12 do not order a tile load after the stores that
// wrote its memory. T is the tile number, 0 .. 7; strides are in bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace proa::gemm::amx {

inline constexpr int kTiles = 8;
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kTileRowBytes = 64;
inline constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;

// The operand of ldtilecfg. A thread may use tiles between load() and TileRelease.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};  // of each tile
  uint8_t rows[16] = {};

  void set(int tile, int64_t num_rows, int64_t bytes) noexcept {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
  // Zeroes all tiles.
  void load() const noexcept { __asm__ volatile("ldtilecfg %0" : : "m"(*this) : "memory"); }
};
static_assert(sizeof(TileConfig) == 64);

// While a thread holds tiles, every context switch saves them and the core may clock lower.
struct TileRelease {
  ~TileRelease() { __asm__ volatile("tilerelease" : : : "memory"); }
};

template <int T>
inline void tile_zero() noexcept {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
}

template <int T>
inline void tile_load(const void* first_row, int64_t stride) noexcept {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(first_row), "r"(stride) : "memory");
}

// The same for rows that are not read again soon: they are left in the L2 cache.
template <int T>
inline void tile_load_once(const void* first_row, int64_t stride) noexcept {
  __asm__ volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(first_row), "r"(stride) : "memory");
}

template <int T>
inline void tile_store(void* first_row, int64_t stride) noexcept {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(first_row), "r"(stride) : "memory");
}

// C[m][n] += sum over k, i < 4 of A[m][4k + i] * B[k][4n + i], int8 x int8 to int32, exact.
template <int C, int A, int B>
inline void tile_dot_int8() noexcept {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// C[m][n] += (sum over k of A[m][2k] * B[k][2n]) + (sum over k of A[m][2k + 1] * B[k][2n + 1]), bf16 to f32:
// both sums from 0 by fused multiply-adds in the order of k, subnormals read and written as 0.
template <int C, int A, int B>
inline void tile_dot_bf16() noexcept {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace proa::gemm::amx
