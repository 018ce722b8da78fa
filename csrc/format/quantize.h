// Quantizers of `proa convert`: rows of float weights to the checkpoint layout of a format. Bit for bit the
// numpy rules of src/proa/weights/quantize.py, on every machine.
#pragma once

#include <cstdint>

#include "format/weight_format.h"

namespace proa::format {

// Where a linear's values come from: `data` as in RawWeight. kF32, kBf16, kInt4G32 and kFp8Block128 are named
// like the WeightFormat they read.
enum class ValueSource : uint8_t { kF32, kBf16, kInt4G32, kFp8Block128 };
enum class QuantizeTarget : uint8_t { kBf16, kInt4G32, kInt8G128, kFp8Block128 };

inline constexpr int64_t kInt8Group = 128;

// Over all elements, the source's value against the target's.
struct QuantizeError {
  double squared_error = 0;
  double squared_norm = 0;
  float max_abs = 0;
  bool finite = true;  // false: the source holds inf or NaN; data and scales are then meaningless
};

// Target arrays: bf16 uint16 [out, in]; int4 uint8 [out, in/2], bf16 [out, in/32]; int8 [out, in], bf16
// [out, ceil(in/128)]; fp8 uint8 [out, in], f32 [ceil(out/128), ceil(in/128)]. Other targets take no scales.
struct QuantizeJob {
  ValueSource source;
  QuantizeTarget target;
  RawWeight values;
  void* data = nullptr;
  void* scales = nullptr;
};

// One thread; the result does not depend on `avx2`, which says whether the CPU has AVX2.
QuantizeError quantize(const QuantizeJob& job, bool avx2);

}  // namespace proa::format
