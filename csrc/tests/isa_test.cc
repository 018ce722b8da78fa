#include "cpu/isa.h"

#include "tests/check.h"

namespace {

using namespace proa::cpu;

constexpr IsaMask kBigMachine = kAvx512Tier | kAvxVnni | kAvx512Vnni | kAmxTile | kAmxInt8;

void uses_everything_by_default() {
  const IsaChoice choice = choose_isa(kBigMachine, nullptr);
  CHECK_EQ(choice.in_use, kBigMachine);
  CHECK_EQ(choice.tier, "amx");
  CHECK_EQ(choose_isa(kBigMachine, "").tier, "amx");
  CHECK_EQ(choose_isa(kAvx2, nullptr).tier, "ref");  // without fma no avx2 cell runs
}

void force_limits_the_mask() {
  CHECK_EQ(choose_isa(kBigMachine, "ref").in_use, 0u);
  CHECK_EQ(choose_isa(kBigMachine, "avx2").in_use, kAvx2Tier | kAvxVnni);
  CHECK_EQ(choose_isa(kBigMachine, "avx512").in_use, kAvx512Tier | kAvxVnni | kAvx512Vnni);
  CHECK_EQ(choose_isa(kBigMachine, "amx").in_use, kBigMachine);
  for (const char* tier : {"ref", "avx2", "avx512", "amx"}) {
    CHECK_EQ(choose_isa(kBigMachine, tier).tier, tier);
    CHECK_EQ(choose_isa(kBigMachine, tier).error, "");
  }
}

void force_fails_loudly() {
  const IsaChoice cannot = choose_isa(kAvx2Tier, "avx512");
  CHECK(cannot.error.find("avx512") != std::string::npos);
  CHECK_EQ(cannot.in_use, 0u);
  const IsaChoice no_int8 = choose_isa(kAvx512Tier | kAmxTile | kAmxBf16, "amx");
  CHECK(no_int8.error.find("amx") != std::string::npos);
  CHECK_EQ(no_int8.in_use, 0u);
  CHECK(choose_isa(kBigMachine, "sse9").error.find("sse9") != std::string::npos);
}

void names_follow_the_mask() {
  const auto names = isa_names(kAvx2 | kAvx512Vnni);
  CHECK_EQ(names.size(), 2u);
  CHECK_EQ(names.front(), "avx2");
  CHECK_EQ(names.back(), "avx512_vnni");
}

}  // namespace

int main() {
  uses_everything_by_default();
  force_limits_the_mask();
  force_fails_loudly();
  names_follow_the_mask();
  return proa::test::result();
}
