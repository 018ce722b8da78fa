// PackedWeight, linear, heads_linear and kernel_report.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "bindings/array.h"
#include "bindings/packed_weight.h"
#include "bindings/pool.h"
#include "cpu/isa.h"
#include "gemm/linear.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace proa::bindings {
namespace {

nb::list weight_formats() {
  nb::list names;
  for (int i = 0; i < format::kNumFormats; ++i)
    names.append(std::string(format::format_name(static_cast<format::WeightFormat>(i))));
  return names;
}

int64_t packed_bytes(const std::string& format_name, int64_t out_features, int64_t in_features) {
  const auto shape = checked_shape("packed_bytes", out_features, in_features);
  const auto format = parse_format("packed_bytes", format_name);
  const format::FormatInfo& info = format::format_info(format);
  const char* reason = info.panel_bytes == nullptr ? "it has no packed layout yet" : info.reject(shape);
  if (reason != nullptr)
    throw std::invalid_argument("[packed_bytes] expected a shape that '" + format_name + "' holds, got [" +
                                std::to_string(out_features) + ", " + std::to_string(in_features) +
                                "]: " + reason);
  return format::packed_bytes(format, shape);
}

nb::list kernel_report(const std::string& format_name, int64_t out_features, int64_t in_features,
                       const std::string& activations_name) {
  const auto shape = checked_shape("kernel_report", out_features, in_features);
  const auto format = parse_format("kernel_report", format_name);
  const auto activations = parse_activations("kernel_report", activations_name);
  nb::list report;
  for (const auto& candidate :
       gemm::explain_selection(format, shape, cpu::isa_choice().in_use, activations)) {
    nb::dict row;
    row["name"] = candidate.kernel->name;
    row["chosen"] = candidate.chosen;
    row["reason"] = candidate.reason;
    report.append(row);
  }
  return report;
}

std::unique_ptr<gemm::PackedWeight> pack(const Pool& pool, nb::handle linear,
                                         const std::string& activations_name) {
  RawLinear raw("PackedWeight.pack", "linear", linear);
  const auto activations = parse_activations("PackedWeight.pack", activations_name);
  const gemm::Kernel& kernel = required_kernel("PackedWeight.pack", raw.format(), raw.shape(), activations);
  const format::RawWeight& weight = raw.checked_weight();
  const auto threads = pool.use();
  nb::gil_scoped_release release;
  return std::make_unique<gemm::PackedWeight>(gemm::pack_weight(*threads, kernel, weight));
}

nb::object dequantize(const gemm::PackedWeight& weight) {
  const auto [out, in] = weight.shape;
  auto values = std::make_unique<std::vector<float>>(static_cast<size_t>(out * in));
  {
    nb::gil_scoped_release release;
    format::unpack(weight.format, weight.shape, weight.bytes, *values);
  }
  float* data = values->data();
  nb::capsule owner(values.release(), [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return nb::cast(
      nb::ndarray<nb::numpy, float>(data, {static_cast<size_t>(out), static_cast<size_t>(in)}, owner));
}

// A view: it keeps the weight alive.
nb::object packed(nb::handle_t<gemm::PackedWeight> self) {
  const auto& weight = nb::cast<const gemm::PackedWeight&>(self);
  const auto* data = reinterpret_cast<const uint8_t*>(weight.bytes.data());
  return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(data, {weight.bytes.size()}, self));
}

void linear(const Pool& pool, nb::object x_object, const gemm::PackedWeight& weight, nb::object out_object,
            nb::object bias_object, bool accumulate) {
  const auto [out_features, in_features] = weight.shape;
  const Array x("linear", "x", x_object, Access::kRead);
  x.expect(DType::kF32, {kAnySize, in_features}, Layout::kRows);
  const Array out("linear", "out", out_object, Access::kWrite);
  out.expect(DType::kF32, {x.size(0), out_features}, Layout::kRows);
  std::unique_ptr<Array> bias;
  if (!bias_object.is_none()) {
    bias = std::make_unique<Array>("linear", "bias", bias_object, Access::kRead);
    bias->expect(DType::kF32, {out_features});
  }
  const gemm::LinearJob job{&weight,       x.data<const float>(),
                            x.stride(0),   out.data<float>(),
                            out.stride(0), bias == nullptr ? nullptr : bias->data<const float>(),
                            accumulate};
  const auto threads = pool.use();
  nb::gil_scoped_release release;
  gemm::run_linears(*threads, {&job, 1}, x.size(0));
}

const gemm::PackedWeight& head_weight(nb::handle item, const gemm::PackedWeight* first) {
  const gemm::PackedWeight* weight = nullptr;
  if (!nb::try_cast(item, weight) || weight == nullptr)
    throw nb::type_error("[heads_linear] expected weights as PackedWeight objects, got another element");
  if (first != nullptr &&
      (weight->format != first->format || weight->shape.out_features != first->shape.out_features ||
       weight->shape.in_features != first->shape.in_features))
    throw std::invalid_argument("[heads_linear] expected weights of one format and shape, got several");
  return *weight;
}

void heads_linear(const Pool& pool, nb::object x_object, nb::sequence weight_objects, nb::object out_object) {
  const nb::tuple weights(weight_objects);  // keeps every weight alive while the GIL is released
  const auto heads = static_cast<int64_t>(weights.size());
  if (heads == 0) throw std::invalid_argument("[heads_linear] expected at least one weight, got none");
  const gemm::PackedWeight& first = head_weight(weights[0], nullptr);
  const Array x("heads_linear", "x", x_object, Access::kRead);
  x.expect(DType::kF32, {kAnySize, heads, first.shape.in_features}, Layout::kRows);
  const Array out("heads_linear", "out", out_object, Access::kWrite);
  out.expect(DType::kF32, {x.size(0), heads, first.shape.out_features}, Layout::kRows);
  std::vector<gemm::LinearJob> jobs;
  for (int64_t h = 0; h < heads; ++h)
    jobs.push_back({&head_weight(weights[static_cast<size_t>(h)], &first),
                    x.data<const float>() + h * x.stride(1), x.stride(0),
                    out.data<float>() + h * out.stride(1), out.stride(0), nullptr, false});
  const auto threads = pool.use();
  nb::gil_scoped_release release;
  gemm::run_linears(*threads, jobs, x.size(0));
}

}  // namespace

void init_gemm(nb::module_& m) {
  m.def("weight_formats", &weight_formats, "The names of all weight formats.");
  m.def("packed_bytes", &packed_bytes, "format"_a, "out_features"_a, "in_features"_a,
        "Bytes of a linear [out, in] in kernel layout. ValueError for a shape that the format cannot hold.");
  m.def("kernel_report", &kernel_report, "format"_a, "out_features"_a, "in_features"_a,
        "activations"_a = "trunk",
        "Every kernel of a weight format, best first: {name, chosen, reason} for a linear [out, in] on this "
        "machine. activations: what kernels may round them to where others run. 'trunk': not to one bf16 "
        "number, 'int8': to anything, 'bf16': not to int8.");
  nb::class_<gemm::PackedWeight>(m, "PackedWeight", "One linear [out, in] in kernel layout (csrc/format).")
      .def_static("pack", &pack, "pool"_a, "linear"_a, "activations"_a = "trunk",
                  "linear: an object with the attributes of proa.weights.linear.RawLinear, which says what "
                  "arrays each format has. activations: as for kernel_report. TypeError or ValueError for "
                  "others, ValueError when no kernel "
                  "takes the shape.")
      .def_prop_ro("format",
                   [](const gemm::PackedWeight& w) { return std::string(format::format_name(w.format)); })
      .def_prop_ro("kernel", [](const gemm::PackedWeight& w) { return std::string(w.kernel->name); })
      .def_prop_ro("out_features", [](const gemm::PackedWeight& w) { return w.shape.out_features; })
      .def_prop_ro("in_features", [](const gemm::PackedWeight& w) { return w.shape.in_features; })
      .def_prop_ro("nbytes", [](const gemm::PackedWeight& w) { return w.bytes.size(); })
      .def_prop_ro("packed", &packed, "The packed bytes (csrc/format/weight_format.h), read-only uint8.")
      .def("dequantize", &dequantize, "The float32 values [out, in].");
  m.def("linear", &linear, "pool"_a, "x"_a, "weight"_a, "out"_a, "bias"_a.none() = nb::none(),
        "accumulate"_a = false,
        "out[t] = W x[t] (+ bias), or += with accumulate. x float32 [T, in], out float32 [T, out]; rows may "
        "be strided.");
  m.def("heads_linear", &heads_linear, "pool"_a, "x"_a, "weights"_a, "out"_a,
        "out[t, h] = W_h x[t, h]. x float32 [T, heads, in], out float32 [T, heads, out], one weight per "
        "head, all of one "
        "format and shape; outer dimensions may be strided.");
}

}  // namespace proa::bindings
