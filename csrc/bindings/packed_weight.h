// Checked checkpoint arrays of one linear, for the bindings that pack them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>

#include "bindings/array.h"
#include "format/format_info.h"
#include "gemm/kernel.h"

namespace proa::bindings {

// Throws std::invalid_argument naming the formats there are.
format::WeightFormat parse_format(const char* function, const std::string& name);

// "trunk", "int8" or "bf16". Throws std::invalid_argument.
gemm::Activations parse_activations(const char* function, const std::string& name);

// Throws std::invalid_argument for sizes below 1 or far above any model.
format::Shape checked_shape(const char* function, int64_t out_features, int64_t in_features);

// The kernel for a linear on this machine. Throws std::invalid_argument with every kernel's reason when there
// is none.
const gemm::Kernel& required_kernel(const char* function, format::WeightFormat format, format::Shape shape,
                                    gemm::Activations activations);

// A linear [out, in] given as an object with the attributes of proa.weights.linear.RawLinear: format,
// out_features, in_features, data, scales, global_scale, layout, bias. Keeps the views of its arrays open.
// Every error names the attribute, what it should be and what it is.
class RawLinear {
 public:
  // `argument` is the name of the object in errors.
  RawLinear(const char* function, const char* argument, nanobind::handle linear);

  format::WeightFormat format() const { return format_; }
  format::Shape shape() const { return weight_.shape; }

  // Throws nanobind::type_error or std::invalid_argument unless the arrays are those of the format, which
  // must have a kernel for the shape.
  const format::RawWeight& checked_weight();
  // float32 [out_features], or nullptr when the attribute `bias` is None. Throws like checked_weight.
  const float* checked_bias();

 private:
  nanobind::object attribute(const char* name) const;
  template <class T>
  T attribute_as(const char* name, const char* expected) const;
  void check_array(std::unique_ptr<Array>& array, const std::string& name, const char* attribute_name,
                   const format::ArraySpec& spec);
  [[noreturn]] void refuse(const char* name, const std::string& expected, const std::string& got) const;

  const char* function_;
  std::string argument_;
  std::string data_name_, scales_name_, bias_name_;  // the arrays point at them
  nanobind::object linear_;
  format::WeightFormat format_{};
  std::unique_ptr<Array> data_, scales_, bias_;
  format::RawWeight weight_;
};

}  // namespace proa::bindings
