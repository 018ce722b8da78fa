#include "bindings/packed_weight.h"

#include <nanobind/stl/string.h>

#include <stdexcept>

#include "cpu/isa.h"

namespace nb = nanobind;

namespace proa::bindings {

using format::Element;
using format::WeightFormat;

namespace {

// Far above any model; keeps products of sizes inside int64.
constexpr int64_t kMaxFeatures = int64_t{1} << 24;

DType dtype_of(Element element) {
  switch (element) {
    case Element::kF32:
      return DType::kF32;
    case Element::kBf16:
      return DType::kBf16;
    case Element::kF16:
      return DType::kU16;
    case Element::kInt8:
      return DType::kI8;
    default:
      return DType::kU8;
  }
}

}  // namespace

format::WeightFormat parse_format(const char* function, const std::string& name) {
  if (const auto format = format::parse_format(name)) return *format;
  std::string names;
  for (int i = 0; i < format::kNumFormats; ++i)
    names += (i > 0 ? ", '" : "'") + std::string(format::format_name(static_cast<WeightFormat>(i))) + "'";
  throw std::invalid_argument(std::string("[") + function + "] expected format as one of " + names +
                              ", got '" + name + "'");
}

gemm::Activations parse_activations(const char* function, const std::string& name) {
  if (name == "trunk") return gemm::Activations::kTrunk;
  if (name == "int8") return gemm::Activations::kInt8;
  if (name == "bf16") return gemm::Activations::kBf16;
  throw std::invalid_argument(std::string("[") + function +
                              "] expected activations as 'trunk', 'int8' or 'bf16', got '" + name + "'");
}

format::Shape checked_shape(const char* function, int64_t out_features, int64_t in_features) {
  const auto valid = [](int64_t n) { return n >= 1 && n <= kMaxFeatures; };
  if (!valid(out_features) || !valid(in_features))
    throw std::invalid_argument(std::string("[") + function +
                                "] expected out_features and in_features in 1 .. " +
                                std::to_string(kMaxFeatures) + ", got " + std::to_string(out_features) +
                                " and " + std::to_string(in_features));
  return {out_features, in_features};
}

const gemm::Kernel& required_kernel(const char* function, WeightFormat format, format::Shape shape,
                                    gemm::Activations activations) {
  const cpu::IsaMask isa = cpu::isa_choice().in_use;
  if (const gemm::Kernel* kernel = gemm::select_kernel(format, shape, isa, activations)) return *kernel;
  std::string text = std::string("[") + function + "] expected a kernel for '" +
                     std::string(format::format_name(format)) + "' [" + std::to_string(shape.out_features) +
                     ", " + std::to_string(shape.in_features) + "], got none:";
  for (const auto& candidate : gemm::explain_selection(format, shape, isa, activations))
    text += std::string(" ") + candidate.kernel->name + ": " + candidate.reason + ";";
  text.pop_back();
  throw std::invalid_argument(text);
}

RawLinear::RawLinear(const char* function, const char* argument, nb::handle linear)
    : function_(function),
      argument_(argument),
      data_name_(argument_ + ".data"),
      scales_name_(argument_ + ".scales"),
      bias_name_(argument_ + ".bias"),
      linear_(nb::borrow(linear)) {
  format_ = parse_format(function, attribute_as<std::string>("format", "a string"));
  weight_.shape = checked_shape(function, attribute_as<int64_t>("out_features", "an integer"),
                                attribute_as<int64_t>("in_features", "an integer"));
  weight_.global_scale = attribute_as<float>("global_scale", "a number");
  const auto layout = attribute_as<std::string>("layout", "a string");
  if (layout != "rows" && layout != "ggml") refuse("layout", "'rows' or 'ggml'", "'" + layout + "'");
  weight_.layout = layout == "rows" ? format::RawLayout::kRows : format::RawLayout::kGgml;
}

const format::RawWeight& RawLinear::checked_weight() {
  const format::FormatInfo& info = format::format_info(format_);
  const std::string name = "'" + std::string(info.name) + "'";
  if (!info.has_global_scale && weight_.global_scale != 1.0f)
    refuse("global_scale", "1 for format " + name, std::to_string(weight_.global_scale));
  const format::RawSpec spec = info.raw_spec(weight_.shape, weight_.layout);
  if (spec.data.element == Element::kNone)
    refuse("layout",
           weight_.layout == format::RawLayout::kGgml ? "'rows' for format " + name
                                                      : "'ggml' for format " + name,
           weight_.layout == format::RawLayout::kGgml ? "'ggml'" : "'rows'");
  check_array(data_, data_name_, "data", spec.data);
  check_array(scales_, scales_name_, "scales", spec.scales);
  weight_.data = data_->data<const void>();
  weight_.scales = scales_ == nullptr ? nullptr : scales_->data<const void>();
  return weight_;
}

const float* RawLinear::checked_bias() {
  const nb::object source = attribute("bias");
  if (source.is_none()) return nullptr;
  bias_ = std::make_unique<Array>(function_, bias_name_.c_str(), source, Access::kRead);
  bias_->expect(DType::kF32, {weight_.shape.out_features});
  return bias_->data<const float>();
}

void RawLinear::check_array(std::unique_ptr<Array>& array, const std::string& name,
                            const char* attribute_name, const format::ArraySpec& spec) {
  const nb::object source = attribute(attribute_name);
  const bool wanted = spec.element != Element::kNone;
  if (!source.is_none()) array = std::make_unique<Array>(function_, name.c_str(), source, Access::kRead);
  if (wanted != (array != nullptr))
    refuse(attribute_name,
           std::string(wanted ? "an array" : "None") + " for format '" +
               std::string(format::format_name(format_)) + "'",
           wanted ? "None" : array->describe());
  if (!wanted) return;
  if (spec.rank == 1)
    array->expect(dtype_of(spec.element), {spec.size[0]});
  else
    array->expect(dtype_of(spec.element), {spec.size[0], spec.size[1]});
}

nb::object RawLinear::attribute(const char* name) const {
  if (!nb::hasattr(linear_, name)) {
    const std::string text = std::string("[") + function_ + "] expected " + argument_ +
                             " with the attributes of RawLinear, got " +
                             nb::type_name(linear_.type()).c_str() + " without " + name;
    throw nb::type_error(text.c_str());
  }
  return linear_.attr(name);
}

template <class T>
T RawLinear::attribute_as(const char* name, const char* expected) const {
  const nb::object value = attribute(name);
  T result;
  if (nb::try_cast(value, result)) return result;
  const std::string text = std::string("[") + function_ + "] expected " + argument_ + "." + name + " as " +
                           expected + ", got " + nb::type_name(value.type()).c_str();
  throw nb::type_error(text.c_str());
}

void RawLinear::refuse(const char* name, const std::string& expected, const std::string& got) const {
  throw std::invalid_argument(std::string("[") + function_ + "] expected " + argument_ + "." + name + " as " +
                              expected + ", got " + got);
}

}  // namespace proa::bindings
