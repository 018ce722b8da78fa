// The cells that multiply bf16 tiles. Include inside an AMX target region and namespace.

#include "gemm/split_act-inl.h"
#include "gemm/split_one_token-inl.h"

template <class Weight>
void gemm(const GemmArgs& args) noexcept {
  if (Weight::kOnVectors && args.num_tokens == 1 && !args.x.tiled) return one_token<Weight>(args);
  const TileRelease release;
  Scratch scratch;
  for (int64_t panel = args.panel_begin; panel < args.panel_end; panel += kPanelsPerPass)
    for (int64_t m = 0; m < args.num_tokens; m += kTokensPerPass)
      multiply_pass<Weight>({args, m, std::min(kTokensPerPass, args.num_tokens - m), panel,
                             std::min(kPanelsPerPass, args.panel_end - panel)},
                            scratch);
}

template <class Weight, int64_t Terms>
constexpr Kernel split_kernel(const char* name, cpu::IsaMask isa,
                              const char* (*reject)(const format::Shape&) noexcept) {
  static_assert(Terms == 1 || Terms == 2);
  return {name,
          isa,
          Weight::kFormat,
          Terms == 1 ? ActFormat::kBf16 : ActFormat::kBf16x2,
          reject,
          split<Terms>,
          gemm<Split<Weight, Terms>>,
          pack<Terms>};
}
