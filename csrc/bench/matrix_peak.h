// The matrix rate of one thread: tile products on registers alone. The ceiling for the AMX cells.
#pragma once

#include <cstdint>

#include "cpu/isa.h"
#include "gemm/amx/tile.h"

namespace proa::bench {

enum class Products : uint8_t { kInt8Columns64, kInt8Columns32, kBf16 };

constexpr cpu::IsaMask kPeakIsa = cpu::kAmxTier | cpu::kAmxBf16;

constexpr int64_t product_columns(Products products) noexcept {
  return products == Products::kInt8Columns64 ? 64 : 32;
}

inline constexpr int64_t kPeakRoundProducts = 4;

// Multiplications and additions of one round.
constexpr double round_operations(Products products) noexcept {
  return 2.0 * 16 * 16 * static_cast<double>(kPeakRoundProducts * product_columns(products));
}

// Four products into four accumulators, `rounds` times. Only where isa_has(kPeakIsa).
inline void run_products(Products products, int64_t rounds) noexcept {
  namespace amx = gemm::amx;
  const int64_t act_bytes = products == Products::kInt8Columns32 ? 32 : amx::kTileRowBytes;
  amx::TileConfig config;
  for (int tile = 0; tile < 4; ++tile) config.set(tile, amx::kTileRows, amx::kTileRowBytes);
  for (int tile = 4; tile < 6; ++tile) config.set(tile, amx::kTileRows, act_bytes);
  for (int tile = 6; tile < amx::kTiles; ++tile) config.set(tile, act_bytes / 4, amx::kTileRowBytes);
  config.load();
  const amx::TileRelease release;
  if (products == Products::kBf16)
    for (int64_t i = 0; i < rounds; ++i) {
      amx::tile_dot_bf16<0, 4, 6>();
      amx::tile_dot_bf16<1, 4, 7>();
      amx::tile_dot_bf16<2, 5, 6>();
      amx::tile_dot_bf16<3, 5, 7>();
    }
  else
    for (int64_t i = 0; i < rounds; ++i) {
      amx::tile_dot_int8<0, 4, 6>();
      amx::tile_dot_int8<1, 4, 7>();
      amx::tile_dot_int8<2, 5, 6>();
      amx::tile_dot_int8<3, 5, 7>();
    }
}

}  // namespace proa::bench
