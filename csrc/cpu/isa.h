// Which vector instructions this process may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace proa::cpu {

using IsaMask = uint32_t;

enum Isa : IsaMask {
  kAvx2 = 1u << 0,
  kFma = 1u << 1,
  kF16c = 1u << 2,
  kAvxVnni = 1u << 3,
  kAvx512F = 1u << 4,
  kAvx512Bw = 1u << 5,
  kAvx512Dq = 1u << 6,
  kAvx512Vl = 1u << 7,
  kAvx512Vnni = 1u << 8,
  kAvx512Bf16 = 1u << 9,
  kAvx512Vbmi = 1u << 10,
  kAmxTile = 1u << 11,
  kAmxInt8 = 1u << 12,
  kAmxBf16 = 1u << 13,
};

// What every avx2 (avx512, amx) cell may assume; a cell that needs more, such as VNNI, asks for more.
inline constexpr IsaMask kAvx2Tier = kAvx2 | kFma | kF16c;
inline constexpr IsaMask kAvx512Tier = kAvx2Tier | kAvx512F | kAvx512Bw | kAvx512Dq | kAvx512Vl;
inline constexpr IsaMask kAmxTier = kAvx512Tier | kAmxTile | kAmxInt8;

struct IsaChoice {
  IsaMask detected = 0;  // what CPU, operating system and (for AMX) the kernel's permission allow
  IsaMask in_use = 0;    // detected, limited by PROA_FORCE_ISA
  std::string tier;      // "ref", "avx2", "avx512" or "amx": the best tier of in_use
  std::string error;     // not empty: PROA_FORCE_ISA is wrong, nothing may run
};

// Decided on the first call. The extension refuses to load when `error` is set, so kernels need not look at
// it.
const IsaChoice& isa_choice();

inline bool isa_has(IsaMask required) { return (isa_choice().in_use & required) == required; }

// Names of the bits of `mask`, in the order of the enum.
std::vector<std::string> isa_names(IsaMask mask);

// The choice for a machine with `detected` and PROA_FORCE_ISA set to `force` (nullptr: not set). Pure.
IsaChoice choose_isa(IsaMask detected, const char* force);

}  // namespace proa::cpu
