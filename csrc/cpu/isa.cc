#include "cpu/isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string_view>

namespace proa::cpu {
namespace {

struct Name {
  Isa bit;
  const char* text;
};
constexpr std::array kNames = {
    Name{kAvx2, "avx2"},
    Name{kFma, "fma"},
    Name{kF16c, "f16c"},
    Name{kAvxVnni, "avx_vnni"},
    Name{kAvx512F, "avx512f"},
    Name{kAvx512Bw, "avx512bw"},
    Name{kAvx512Dq, "avx512dq"},
    Name{kAvx512Vl, "avx512vl"},
    Name{kAvx512Vnni, "avx512_vnni"},
    Name{kAvx512Bf16, "avx512_bf16"},
    Name{kAvx512Vbmi, "avx512_vbmi"},
    Name{kAmxTile, "amx_tile"},
    Name{kAmxInt8, "amx_int8"},
    Name{kAmxBf16, "amx_bf16"},
};

// XCR0 bits: which register files the operating system saves.
constexpr uint64_t kYmmState = 0x6;
constexpr uint64_t kZmmState = 0xe6;
constexpr uint64_t kTileState = 0x60000;

struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidLeaf r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // leaves zeros for a leaf the CPU lacks
  return r;
}

uint64_t xgetbv0() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux gives tile data to a process only on request (ARCH_REQ_XCOMP_PERM, feature 18); its threads, also
// those that run already, may use it then.
bool request_tile_permission() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

IsaMask detect() {
  const CpuidLeaf one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  const bool osxsave = one.ecx & (1u << 27);
  if (!osxsave) return 0;
  const uint64_t xcr0 = xgetbv0();
  const auto saved = [&](uint64_t state) { return (xcr0 & state) == state; };
  IsaMask mask = 0;
  const auto add = [&](uint32_t reg, int bit, Isa isa) {
    if (reg & (1u << bit)) mask |= isa;
  };
  if (!saved(kYmmState) || !(one.ecx & (1u << 28))) return 0;
  add(seven.ebx, 5, kAvx2);
  add(one.ecx, 12, kFma);
  add(one.ecx, 29, kF16c);
  add(seven_one.eax, 4, kAvxVnni);
  if (saved(kZmmState) && (seven.ebx & (1u << 16))) {
    mask |= kAvx512F;
    add(seven.ebx, 30, kAvx512Bw);
    add(seven.ebx, 17, kAvx512Dq);
    add(seven.ebx, 31, kAvx512Vl);
    add(seven.ecx, 11, kAvx512Vnni);
    add(seven_one.eax, 5, kAvx512Bf16);
    add(seven.ecx, 1, kAvx512Vbmi);
  }
  if (saved(kTileState) && (seven.edx & (1u << 24)) && request_tile_permission()) {
    mask |= kAmxTile;
    add(seven.edx, 25, kAmxInt8);
    add(seven.edx, 22, kAmxBf16);
  }
  return mask;
}

bool has_all(IsaMask mask, IsaMask required) { return (mask & required) == required; }

const char* best_tier(IsaMask mask) {
  if (has_all(mask, kAmxTier)) return "amx";
  if (has_all(mask, kAvx512Tier)) return "avx512";
  if (has_all(mask, kAvx2Tier)) return "avx2";
  return "ref";
}

struct Tier {
  std::string_view name;
  IsaMask required;
  IsaMask allowed;
};
constexpr std::array kTiers = {
    Tier{"ref", 0, 0},
    Tier{"avx2", kAvx2Tier, kAvx2Tier | kAvxVnni},
    Tier{"avx512", kAvx512Tier, kAvx512Tier | kAvxVnni | kAvx512Vnni | kAvx512Bf16 | kAvx512Vbmi},
    Tier{"amx", kAmxTier, ~IsaMask{0}},
};

}  // namespace

IsaChoice choose_isa(IsaMask detected, const char* force) {
  IsaChoice choice{.detected = detected, .in_use = detected, .tier = best_tier(detected), .error = {}};
  if (force == nullptr || *force == '\0') return choice;
  for (const Tier& tier : kTiers) {
    if (tier.name != force) continue;
    choice.in_use = detected & tier.allowed;
    choice.tier = tier.name;
    if (!has_all(detected, tier.required)) {
      choice.in_use = 0;
      choice.error = "[PROA_FORCE_ISA] expected an ISA this machine runs (" +
                     std::string(best_tier(detected)) + " or lower), got " + force +
                     ". Fix: unset PROA_FORCE_ISA";
    }
    return choice;
  }
  choice.in_use = 0;
  choice.error = std::string("[PROA_FORCE_ISA] expected ref, avx2, avx512 or amx, got ") + force +
                 ". Fix: unset PROA_FORCE_ISA";
  return choice;
}

const IsaChoice& isa_choice() {
  static const IsaChoice choice = choose_isa(detect(), std::getenv("PROA_FORCE_ISA"));
  return choice;
}

std::vector<std::string> isa_names(IsaMask mask) {
  std::vector<std::string> names;
  for (const Name& name : kNames)
    if (mask & name.bit) names.emplace_back(name.text);
  return names;
}

}  // namespace proa::cpu
