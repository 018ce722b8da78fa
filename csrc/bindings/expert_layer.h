// What bindings that run expert layers share.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/array.h"
#include "moe/expert_layer.h"

namespace proa::bindings {

// The layer of a bound ExpertLayer, which must be kept alive. Throws nanobind::type_error.
moe::ExpertLayer& expert_layer_of(const char* function, nanobind::handle object);

// The arrays of a forward, checked against a layer but for the values of the ids, and their views.
class BoundBatch {
 public:
  BoundBatch(const char* function, const moe::ExpertLayer& layer, nanobind::handle x, nanobind::handle ids,
             nanobind::handle weights, nanobind::handle out, bool accumulate);

  const moe::ExpertLayer::Batch& batch() const { return batch_; }

 private:
  Array x_, ids_, weights_, out_;
  moe::ExpertLayer::Batch batch_;
};

}  // namespace proa::bindings
