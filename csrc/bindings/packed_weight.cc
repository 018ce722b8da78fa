#include "bindings/packed_weight.h"

#include <stdexcept>

#include "cpu/isa.h"

namespace nb = nanobind;

namespace proa::bindings {

using format::WeightFormat;

format::WeightFormat parse_format(const char* function, const std::string& name) {
  if (const auto format = format::parse_format(name)) return *format;
  throw std::invalid_argument(std::string("[") + function +
                              "] expected format as 'f32', 'bf16', 'int4_g32' or 'fp8_block128', got '" +
                              name + "'");
}

const gemm::Kernel& required_kernel(const char* function, WeightFormat format, format::Shape shape) {
  const cpu::IsaMask isa = cpu::isa_choice().in_use;
  if (const gemm::Kernel* kernel = gemm::select_kernel(format, shape, isa)) return *kernel;
  std::string text = std::string("[") + function + "] expected a kernel for '" +
                     std::string(format::format_name(format)) + "' [" + std::to_string(shape.out_features) +
                     ", " + std::to_string(shape.in_features) + "], got none:";
  for (const auto& candidate : gemm::explain_selection(format, shape, isa))
    text += std::string(" ") + candidate.kernel->name + ": " + candidate.reason + ";";
  text.pop_back();
  throw std::invalid_argument(text);
}

RawLinear::RawLinear(const char* function, const char* data_name, const char* scales_name,
                     WeightFormat format, format::Shape shape, nb::handle data, nb::handle scales)
    : data_(function, data_name, data, Access::kRead) {
  const bool scaled = format == WeightFormat::kInt4G32 || format == WeightFormat::kFp8Block128;
  if (!scales.is_none()) scales_ = std::make_unique<Array>(function, scales_name, scales, Access::kRead);
  if (scaled != (scales_ != nullptr))
    throw std::invalid_argument(std::string("[") + function + "] expected " + scales_name + " to be " +
                                (scaled ? "an array" : "None") + " for format '" +
                                std::string(format::format_name(format)) + "', got " +
                                (scaled ? "None" : scales_->describe()));
  const auto ceil = [](int64_t n) { return (n + format::kFp8Block - 1) / format::kFp8Block; };
  const auto [out, in] = shape;
  switch (format) {
    case WeightFormat::kF32:
      data_.expect(DType::kF32, {out, in});
      break;
    case WeightFormat::kBf16:
      data_.expect(DType::kBf16, {out, in});
      break;
    case WeightFormat::kInt4G32:
      data_.expect(DType::kU8, {out, in / 2});
      scales_->expect(DType::kBf16, {out, in / format::kInt4Group});
      break;
    case WeightFormat::kFp8Block128:
      data_.expect(DType::kU8, {out, in});
      scales_->expect(DType::kF32, {ceil(out), ceil(in)});
      break;
  }
  weight_ = {shape, data_.data<const void>(), scaled ? scales_->data<const void>() : nullptr};
}

}  // namespace proa::bindings
