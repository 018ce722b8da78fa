// quantize and xxh64, for `proa convert` and the reader of what it writes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "base/xxh64.h"
#include "bindings/array.h"
#include "cpu/isa.h"
#include "format/quantize.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace proa::bindings {
namespace {

using format::QuantizeTarget;
using format::ValueSource;

constexpr const char* kFunction = "quantize";

struct Formats {
  ValueSource source;
  QuantizeTarget target;
};

Formats parse(const std::string& source_name, const std::string& target_name) {
  Formats formats;
  if (source_name == "f32")
    formats.source = ValueSource::kF32;
  else if (source_name == "bf16")
    formats.source = ValueSource::kBf16;
  else if (source_name == "int4_g32")
    formats.source = ValueSource::kInt4G32;
  else if (source_name == "fp8_block128")
    formats.source = ValueSource::kFp8Block128;
  else
    throw std::invalid_argument(
        "[quantize] expected source as 'f32', 'bf16', 'int4_g32' or 'fp8_block128', got '" + source_name +
        "'");
  if (target_name == "bf16")
    formats.target = QuantizeTarget::kBf16;
  else if (target_name == "int4_g32")
    formats.target = QuantizeTarget::kInt4G32;
  else if (target_name == "int8_g128")
    formats.target = QuantizeTarget::kInt8G128;
  else if (target_name == "fp8_block128")
    formats.target = QuantizeTarget::kFp8Block128;
  else
    throw std::invalid_argument(
        "[quantize] expected target as 'bf16', 'int4_g32', 'int8_g128' or 'fp8_block128', got '" +
        target_name + "'");
  return formats;
}

constexpr int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// The values [out, in] of the source's data and scales.
format::RawWeight checked_values(ValueSource source, const Array& data, const Array* scales) {
  const bool nibbles = source == ValueSource::kInt4G32;
  data.expect(source == ValueSource::kF32    ? DType::kF32
              : source == ValueSource::kBf16 ? DType::kBf16
                                             : DType::kU8,
              {kAnySize, kAnySize});
  const int64_t out = data.size(0), in = nibbles ? 2 * data.size(1) : data.size(1);
  if (nibbles && in % format::kInt4Group != 0) data.fail("rows of 16 bytes per group", data.describe());
  const bool scaled = nibbles || source == ValueSource::kFp8Block128;
  if (scaled != (scales != nullptr)) data.fail(scaled ? "scales with it" : "no scales with it", "the other");
  if (nibbles) scales->expect(DType::kBf16, {out, in / format::kInt4Group});
  if (source == ValueSource::kFp8Block128)
    scales->expect(DType::kF32, {blocks(out, format::kFp8Block), blocks(in, format::kFp8Block)});
  return {{out, in}, data.data<const void>(), scaled ? scales->data<const void>() : nullptr};
}

void check_target(QuantizeTarget target, const format::Shape& shape, const Array& data, const Array* scales) {
  const auto [out, in] = shape;
  if ((target == QuantizeTarget::kBf16) != (scales == nullptr))
    data.fail(scales == nullptr ? "out_scales with it" : "no out_scales with it", "the other");
  if (target == QuantizeTarget::kBf16) {
    data.expect(DType::kBf16, {out, in});
  } else if (target == QuantizeTarget::kInt4G32) {
    if (in % format::kInt4Group != 0) data.fail("rows in groups of 32", data.describe());
    data.expect(DType::kU8, {out, in / 2});
    scales->expect(DType::kBf16, {out, in / format::kInt4Group});
  } else if (target == QuantizeTarget::kInt8G128) {
    data.expect(DType::kU8, {out, in});
    scales->expect(DType::kBf16, {out, blocks(in, format::kInt8Group)});
  } else {
    data.expect(DType::kU8, {out, in});
    scales->expect(DType::kF32, {blocks(out, format::kFp8Block), blocks(in, format::kFp8Block)});
  }
}

nb::tuple quantize(const std::string& source, nb::object data, nb::object scales, const std::string& target,
                   nb::object out_data, nb::object out_scales) {
  const Formats formats = parse(source, target);
  const auto optional = [](const char* name, nb::handle object, Access access) {
    return object.is_none() ? nullptr : std::make_unique<Array>(kFunction, name, object, access);
  };
  const Array values(kFunction, "data", data, Access::kRead);
  const auto value_scales = optional("scales", scales, Access::kRead);
  const Array result(kFunction, "out_data", out_data, Access::kWrite);
  const auto result_scales = optional("out_scales", out_scales, Access::kWrite);
  const format::RawWeight raw = checked_values(formats.source, values, value_scales.get());
  check_target(formats.target, raw.shape, result, result_scales.get());
  const format::QuantizeJob job{formats.source, formats.target, raw, result.data<void>(),
                                result_scales == nullptr ? nullptr : result_scales->data<void>()};
  const bool avx2 = cpu::isa_has(cpu::kAvx2Tier);
  format::QuantizeError error;
  {
    nb::gil_scoped_release release;
    error = format::quantize(job, avx2);
  }
  return nb::make_tuple(error.squared_error, error.squared_norm, error.max_abs, error.finite);
}

uint64_t xxh64(nb::object bytes) {
  const Array array("xxh64", "data", bytes, Access::kRead);
  array.expect(DType::kU8, {kAnySize});
  const std::span<const std::byte> view(array.data<const std::byte>(), static_cast<size_t>(array.size(0)));
  nb::gil_scoped_release release;
  return base::xxh64(view);
}

}  // namespace

void init_convert(nb::module_& m) {
  m.def("quantize", &quantize, "source"_a, "data"_a, "scales"_a.none(), "target"_a, "out_data"_a,
        "out_scales"_a.none(),
        "One linear [out, in] from `source` (f32, bf16, int4_g32, fp8_block128) to `target` (bf16, int4_g32, "
        "int8_g128, fp8_block128), in the arrays of RawLinear; int8 as a uint8 view. Returns the summed "
        "squared "
        "error, the summed squares of the values, the largest absolute error, and whether all values were "
        "finite (if not, the rest means nothing). Runs on the calling thread without the GIL.");
  m.def("xxh64", &xxh64, "data"_a, "XXH64, seed 0, of uint8 [n]. Without the GIL.");
}

}  // namespace proa::bindings
