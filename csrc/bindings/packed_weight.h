// Checked checkpoint arrays of one linear, for the bindings that pack them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>

#include "bindings/array.h"
#include "gemm/kernel.h"

namespace proa::bindings {

// Throws std::invalid_argument naming the formats there are.
format::WeightFormat parse_format(const char* function, const std::string& name);

// The kernel for a linear on this machine. Throws std::invalid_argument with every kernel's reason when there
// is none.
const gemm::Kernel& required_kernel(const char* function, format::WeightFormat format, format::Shape shape);

// The arrays `data` and `scales` of a linear [out, in]; keeps the views open.
class RawLinear {
 public:
  RawLinear(const char* function, const char* data_name, const char* scales_name, format::WeightFormat format,
            format::Shape shape, nanobind::handle data, nanobind::handle scales);
  const format::RawWeight& weight() const { return weight_; }

 private:
  Array data_;
  std::unique_ptr<Array> scales_;
  format::RawWeight weight_;
};

}  // namespace proa::bindings
