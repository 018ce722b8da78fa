// ExpertLayer and route.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/prefault.h"
#include "bindings/array.h"
#include "bindings/expert_layer.h"
#include "bindings/packed_weight.h"
#include "bindings/pool.h"
#include "moe/expert_layer.h"
#include "moe/route.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace proa::bindings {
namespace {

// Their product, the pairs of a batch, is an int32.
constexpr int64_t kMaxTokens = 1 << 20;
constexpr int64_t kMaxTopK = 1 << 10;
// A core clears pages at some GB/s: more than this many are faster than any disk.
constexpr int kMaxPrefaultThreads = 8;

[[noreturn]] void refuse(const std::string& function, const std::string& expected, const std::string& got) {
  throw std::invalid_argument("[" + function + "] expected " + expected + ", got " + got);
}

void check_range(const char* function, const char* name, int64_t value, int64_t largest) {
  if (value < 1 || value > largest)
    refuse(function, std::string(name) + " in 1 .. " + std::to_string(largest), std::to_string(value));
}

ops::Activation make_activation(const std::string& name, float limit, float alpha) {
  if (name != "silu" && name != "swigluoai")
    refuse("ExpertLayer", "activation 'silu' or 'swigluoai'", "'" + name + "'");
  if (!(limit > 0.0f)) refuse("ExpertLayer", "limit above 0", std::to_string(limit));
  if (!std::isfinite(alpha)) refuse("ExpertLayer", "a finite alpha", std::to_string(alpha));
  return {name == "silu" ? ops::Gating::kSilu : ops::Gating::kSwigluOai, limit, alpha};
}

// A workspace with the pool its layers run on.
struct BoundWorkspace {
  std::shared_ptr<runtime::ThreadPool> threads;
  moe::ExpertWorkspace workspace;

  BoundWorkspace(std::shared_ptr<runtime::ThreadPool> pool, int64_t max_tokens)
      : threads(std::move(pool)), workspace(*threads, max_tokens) {}
};

std::shared_ptr<BoundWorkspace> make_workspace(const Pool& pool, int64_t max_tokens) {
  check_range("ExpertWorkspace", "max_tokens", max_tokens, kMaxTokens);
  return std::make_shared<BoundWorkspace>(pool.use(), max_tokens);
}

// The layer with the workspace it uses.
class BoundExpertLayer {
 public:
  BoundExpertLayer(std::shared_ptr<BoundWorkspace> workspace, int64_t num_experts, int64_t hidden,
                   int64_t intermediate, const std::string& format_name, const std::string& activation,
                   int64_t max_top_k, const std::string& activations_name, float limit, float alpha,
                   bool bias, const std::optional<std::string>& down_format_name)
      : workspace_(std::move(workspace)) {
    check_range("ExpertLayer", "num_experts", num_experts, 1 << 16);
    check_range("ExpertLayer", "hidden", hidden, 1 << 20);
    check_range("ExpertLayer", "intermediate", intermediate, 1 << 20);
    check_range("ExpertLayer", "max_top_k", max_top_k, kMaxTopK);
    const auto format = parse_format("ExpertLayer", format_name);
    const auto activations = parse_activations("ExpertLayer", activations_name);
    const auto& gate_up = required_kernel("ExpertLayer", format, {intermediate, hidden}, activations);
    const auto down_format = down_format_name ? parse_format("ExpertLayer", *down_format_name) : format;
    const auto& down = required_kernel("ExpertLayer", down_format, {hidden, intermediate}, activations);
    layer_ = std::make_unique<moe::ExpertLayer>(
        workspace_->workspace, moe::ExpertLayerConfig{num_experts, hidden, intermediate, &gate_up, &down,
                                                      max_top_k, make_activation(activation, limit, alpha),
                                                      bias, activations == gemm::Activations::kBf16});
  }

  const moe::ExpertLayer& layer() const { return *layer_; }
  moe::ExpertLayer& layer() { return *layer_; }
  const moe::ExpertLayerConfig& config() const { return layer_->config(); }

  void load(int64_t expert, nb::handle gate, nb::handle up, nb::handle down) {
    constexpr const char* kName = "ExpertLayer.load";
    check_expert(kName, expert);
    RawLinear raw_gate(kName, "gate", gate), raw_up(kName, "up", up), raw_down(kName, "down", down);
    check_linear("gate", raw_gate, config().gate_up_kernel->weight, {config().intermediate, config().hidden});
    check_linear("up", raw_up, config().gate_up_kernel->weight, {config().intermediate, config().hidden});
    check_linear("down", raw_down, config().down_kernel->weight, {config().hidden, config().intermediate});
    const format::RawWeight &gate_weight = raw_gate.checked_weight(), &up_weight = raw_up.checked_weight(),
                            &down_weight = raw_down.checked_weight();
    const moe::ExpertBiases biases{raw_gate.checked_bias(), raw_up.checked_bias(), raw_down.checked_bias()};
    if (!config().has_bias && (biases.gate != nullptr || biases.up != nullptr || biases.down != nullptr))
      refuse(kName, "no bias, as the layer was made without", "one");
    nb::gil_scoped_release release;
    layer_->load(expert, gate_weight, up_weight, down_weight, biases);
  }

  void reserve(int64_t expert) {
    check_expert("ExpertLayer.reserve", expert);
    nb::gil_scoped_release release;
    layer_->reserve(expert);
  }

  void commit(int64_t expert) {
    check_slot("ExpertLayer.commit", expert);
    layer_->commit(expert);
  }

  void drop(int64_t expert) {
    check_expert("ExpertLayer.drop", expert);
    nb::gil_scoped_release release;
    layer_->drop(expert);
  }

  void release_memory() {
    nb::gil_scoped_release release;
    layer_->release_memory();
  }

  std::unique_ptr<base::Prefault> prefault(int64_t count) const {
    check_range("ExpertLayer.prefault", "count", count, config().num_experts);
    const int threads = std::clamp(workspace_->threads->num_threads() / 4, 1, kMaxPrefaultThreads);
    return std::make_unique<base::Prefault>(layer_->weights().next_memory(count), threads);
  }

  std::vector<std::pair<uintptr_t, size_t>> blocks(int64_t expert) const {
    check_slot("ExpertLayer.blocks", expert);
    const moe::ExpertWeights& weights = layer_->weights();
    std::vector<std::pair<uintptr_t, size_t>> blocks;
    const auto add = [&](const moe::ExpertWeights::Linear& linear, format::WeightFormat format) {
      const auto bytes = static_cast<size_t>(format::packed_bytes(format, linear.shape));
      const auto start = reinterpret_cast<uintptr_t>(linear.data);
      if (!blocks.empty() && blocks.back().first + blocks.back().second == start)
        blocks.back().second += bytes;
      else if (bytes > 0)
        blocks.emplace_back(start, bytes);
    };
    const int nodes = workspace_->threads->num_nodes();
    for (int node = 0; node < nodes; ++node) add(weights.gate(node, expert), config().gate_up_kernel->weight);
    for (int node = 0; node < nodes; ++node) add(weights.up(node, expert), config().gate_up_kernel->weight);
    for (int node = 0; node < nodes; ++node) add(weights.down(node, expert), config().down_kernel->weight);
    return blocks;
  }

  std::vector<std::pair<uintptr_t, size_t>> used_memory() const {
    std::vector<std::pair<uintptr_t, size_t>> ranges;
    for (const std::span<std::byte> range : layer_->weights().used_memory())
      ranges.emplace_back(reinterpret_cast<uintptr_t>(range.data()), range.size());
    return ranges;
  }

  bool is_loaded(int64_t expert) const {
    check_expert("ExpertLayer.is_loaded", expert);
    return layer_->is_loaded(expert);
  }

  void forward(nb::object x, nb::object ids, nb::object weights, nb::object out, bool accumulate) {
    const BoundBatch bound("ExpertLayer.forward", *layer_, x, ids, weights, out, accumulate);
    const moe::ExpertLayer::Batch& batch = bound.batch();
    check_ids(batch.ids, batch.num_tokens * batch.top_k);
    nb::gil_scoped_release release;
    layer_->forward(batch);
  }

 private:
  void check_expert(const char* function, int64_t expert) const {
    if (expert < 0 || expert >= config().num_experts)
      refuse(function, "expert in 0 .. " + std::to_string(config().num_experts - 1), std::to_string(expert));
  }

  void check_slot(const char* function, int64_t expert) const {
    check_expert(function, expert);
    if (!layer_->weights().has_slot(expert))
      refuse(function, "an expert that is loaded or reserved", std::to_string(expert));
  }

  static void check_linear(const char* argument, const RawLinear& linear, format::WeightFormat format,
                           format::Shape shape) {
    const auto describe = [](format::WeightFormat name, format::Shape size) {
      return "'" + std::string(format::format_name(name)) + "' [" + std::to_string(size.out_features) + ", " +
             std::to_string(size.in_features) + "]";
    };
    if (linear.format() != format || linear.shape().out_features != shape.out_features ||
        linear.shape().in_features != shape.in_features)
      refuse("ExpertLayer.load", std::string(argument) + " as " + describe(format, shape),
             describe(linear.format(), linear.shape()));
  }

  void check_ids(const int32_t* ids, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
      if (ids[i] == -1) continue;
      if (ids[i] < 0 || ids[i] >= config().num_experts)
        refuse("ExpertLayer.forward", "ids of -1 .. " + std::to_string(config().num_experts - 1),
               std::to_string(ids[i]));
      if (!layer_->is_loaded(ids[i]))
        refuse("ExpertLayer.forward", "ids of loaded experts", std::to_string(ids[i]));
    }
  }

  std::shared_ptr<BoundWorkspace> workspace_;
  std::unique_ptr<moe::ExpertLayer> layer_;
};

moe::Score parse_score(const std::string& name) {
  if (name == "softmax") return moe::Score::kSoftmax;
  if (name == "sigmoid") return moe::Score::kSigmoid;
  refuse("route", "score 'softmax' or 'sigmoid'", "'" + name + "'");
}

void route(const Pool& pool, nb::object logits_object, nb::object ids_object, nb::object weights_object,
           nb::object bias_object, const std::string& score, int64_t num_groups, int64_t top_groups,
           bool renormalize, float eps, float scale, nb::object counts_object) {
  const Array logits("route", "logits", logits_object, Access::kRead);
  logits.expect(DType::kF32, {kAnySize, kAnySize});
  const Array ids("route", "ids", ids_object, Access::kWrite);
  ids.expect(DType::kI32, {logits.size(0), kAnySize});
  const Array weights("route", "weights", weights_object, Access::kWrite);
  weights.expect(DType::kF32, {logits.size(0), ids.size(1)});
  std::unique_ptr<Array> bias;
  if (!bias_object.is_none()) {
    bias = std::make_unique<Array>("route", "bias", bias_object, Access::kRead);
    bias->expect(DType::kF32, {logits.size(1)});
  }
  std::unique_ptr<Array> counts;
  if (!counts_object.is_none()) {
    counts = std::make_unique<Array>("route", "counts", counts_object, Access::kWrite);
    counts->expect(DType::kI64, {logits.size(1)});
  }
  const moe::RouteOptions options{
      logits.size(1), ids.size(1), parse_score(score), num_groups, top_groups, renormalize, eps, scale};
  if (const char* expected = moe::route_error(options))
    refuse("route", expected,
           "top_k=" + std::to_string(ids.size(1)) + ", experts=" + std::to_string(logits.size(1)) +
               ", num_groups=" + std::to_string(num_groups) + ", top_groups=" + std::to_string(top_groups) +
               ", eps=" + std::to_string(eps) + ", scale=" + std::to_string(scale));
  const auto threads = pool.use();
  nb::gil_scoped_release release;
  moe::route(*threads, options, logits.data<const float>(),
             bias == nullptr ? nullptr : bias->data<const float>(), logits.size(0), ids.data<int32_t>(),
             weights.data<float>(), counts == nullptr ? nullptr : counts->data<int64_t>());
}

}  // namespace

moe::ExpertLayer& expert_layer_of(const char* function, nb::handle object) {
  BoundExpertLayer* layer = nullptr;
  if (!nb::try_cast<BoundExpertLayer*>(object, layer) || layer == nullptr)
    throw nb::type_error(
        (std::string("[") + function + "] expected an ExpertLayer, got another object").c_str());
  return layer->layer();
}

BoundBatch::BoundBatch(const char* function, const moe::ExpertLayer& layer, nb::handle x, nb::handle ids,
                       nb::handle weights, nb::handle out, bool accumulate)
    : x_(function, "x", x, Access::kRead),
      ids_(function, "ids", ids, Access::kRead),
      weights_(function, "weights", weights, Access::kRead),
      out_(function, "out", out, Access::kWrite) {
  const int64_t hidden = layer.config().hidden, max_top_k = layer.config().max_top_k;
  x_.expect(DType::kF32, {kAnySize, hidden});
  const int64_t tokens = x_.size(0);
  ids_.expect(DType::kI32, {tokens, kAnySize});
  const int64_t top_k = ids_.size(1);
  weights_.expect(DType::kF32, {tokens, top_k});
  out_.expect(DType::kF32, {tokens, hidden});
  if (tokens > layer.max_tokens())
    refuse(function, "at most max_tokens = " + std::to_string(layer.max_tokens()) + " tokens",
           std::to_string(tokens));
  if (top_k > max_top_k)
    refuse(function, "at most max_top_k = " + std::to_string(max_top_k) + " slots", std::to_string(top_k));
  batch_ = {x_.data<const float>(),
            ids_.data<const int32_t>(),
            weights_.data<const float>(),
            out_.data<float>(),
            tokens,
            top_k,
            accumulate};
}

void init_moe(nb::module_& m) {
  nb::class_<BoundWorkspace>(m, "ExpertWorkspace",
                             "Scratch memory of expert layers that run one after another, as large as the "
                             "largest of them needs it for max_tokens tokens; it grows when a layer is made. "
                             "One forward at a time in all of its layers.")
      .def(nb::new_(&make_workspace), "pool"_a, "max_tokens"_a = 512)
      .def_prop_ro("max_tokens", [](const BoundWorkspace& w) { return w.workspace.max_tokens(); })
      .def_prop_ro("nbytes", [](const BoundWorkspace& w) { return w.workspace.bytes(); })
      .def(
          "touch", [](BoundWorkspace& w) { w.workspace.touch(); }, nb::call_guard<nb::gil_scoped_release>(),
          "Has the system give its memory now, on machines with one NUMA node.");
  nb::class_<base::Prefault>(m, "Prefault", "Memory on its way from the system.")
      .def("wait", &base::Prefault::wait, nb::call_guard<nb::gil_scoped_release>());
  nb::class_<BoundExpertLayer>(m, "ExpertLayer",
                               "The routed experts of one layer; a dense MLP is one with one expert.")
      .def(nb::init<std::shared_ptr<BoundWorkspace>, int64_t, int64_t, int64_t, const std::string&,
                    const std::string&, int64_t, const std::string&, float, float, bool,
                    const std::optional<std::string>&>(),
           "workspace"_a, "num_experts"_a, "hidden"_a, "intermediate"_a, "format"_a, "activation"_a = "silu",
           "max_top_k"_a = 8, "activations"_a = "int8", "limit"_a = std::numeric_limits<float>::infinity(),
           "alpha"_a = 1.0f, "bias"_a = false, "down_format"_a = nb::none(),
           "format: of gate and up, and of down unless down_format is another. "
           "With g = min(gate, limit) and u = clamp(up, -limit, limit), activation 'silu' is g * sigmoid(g) "
           "* u, "
           "'swigluoai' g * sigmoid(alpha * g) * (u + 1). Linears may have a bias when `bias` is set. "
           "activations: as for kernel_report.")
      .def("load", &BoundExpertLayer::load, "expert"_a, "gate"_a, "up"_a, "down"_a,
           "gate, up [intermediate, hidden], down [hidden, intermediate], objects as for PackedWeight.pack.")
      .def("forward", &BoundExpertLayer::forward, "x"_a, "ids"_a, "weights"_a, "out"_a,
           "accumulate"_a = false,
           "out[t] = sum over slots of weights * expert(x[t]), or += with accumulate. x, out float32 [T, "
           "hidden]; ids "
           "int32 [T, k], -1 skips the slot; weights float32 [T, k].")
      .def("is_loaded", &BoundExpertLayer::is_loaded, "expert"_a)
      .def("blocks", &BoundExpertLayer::blocks, "expert"_a,
           "(address, bytes) of its packed bytes: together, in this order, gate, up and down as PackedWeight "
           "packs "
           "them. One block on machines with one NUMA node.")
      .def("reserve", &BoundExpertLayer::reserve, "expert"_a,
           "Takes memory for an expert whose blocks the caller writes before `commit`.")
      .def("commit", &BoundExpertLayer::commit, "expert"_a)
      .def("drop", &BoundExpertLayer::drop, "expert"_a,
           "Forgets an expert; no forward may name it. Its memory is kept for the next expert that comes.")
      .def("release_memory", &BoundExpertLayer::release_memory,
           "Gives the memory of dropped experts back to the system; none of it may be pinned.")
      .def(
          "prefault", &BoundExpertLayer::prefault, "count"_a, nb::keep_alive<0, 1>(),
          "Takes the memory of the next `count` experts to be loaded from the system, on threads of its own, "
          "until what it returns is dropped.")
      .def_prop_ro("used_memory", &BoundExpertLayer::used_memory,
                   "(address, bytes) of whole pages that hold the experts.")
      .def_prop_ro(
          "spare_slots", [](const BoundExpertLayer& l) { return l.layer().weights().num_spare_slots(); },
          "Experts that `reserve` has memory for without asking the system.")
      .def_prop_ro("num_experts", [](const BoundExpertLayer& l) { return l.config().num_experts; })
      .def_prop_ro("nbytes", [](const BoundExpertLayer& l) { return l.layer().weight_bytes(); })
      .def_prop_ro(
          "linear_bytes",
          [](const BoundExpertLayer& l) {
            const auto& c = l.config();
            const int64_t gate = format::packed_bytes(c.gate_up_kernel->weight, {c.intermediate, c.hidden});
            return std::array{gate, gate,
                              format::packed_bytes(c.down_kernel->weight, {c.hidden, c.intermediate})};
          },
          "Packed bytes of gate, up and down of an expert.")
      .def_prop_ro(
          "formats",
          [](const BoundExpertLayer& l) {
            return std::pair(std::string(format::format_name(l.config().gate_up_kernel->weight)),
                             std::string(format::format_name(l.config().down_kernel->weight)));
          },
          "Of gate and up, and of down.")
      .def_prop_ro("has_bias", [](const BoundExpertLayer& l) { return l.config().has_bias; })
      .def_prop_ro("bytes_per_expert", [](const BoundExpertLayer& l) { return l.layer().bytes_per_expert(); })
      .def_prop_ro(
          "bytes_read", [](const BoundExpertLayer& l) { return l.layer().bytes_read(); },
          "Total over all forwards of the bytes of the distinct experts each used.")
      .def_prop_ro(
          "seconds",
          [](const BoundExpertLayer& l) { return static_cast<double>(l.layer().nanoseconds()) * 1e-9; },
          "Time spent in all forwards.")
      .def_prop_ro("kernel",
                   [](const BoundExpertLayer& l) { return std::string(l.config().gate_up_kernel->name); });
  m.def("route", &route, "pool"_a, "logits"_a, "ids"_a, "weights"_a, "bias"_a.none() = nb::none(),
        "score"_a = "softmax", "num_groups"_a = 1, "top_groups"_a = 1, "renormalize"_a = true, "eps"_a = 0.0f,
        "scale"_a = 1.0f, "counts"_a.none() = nb::none(),
        "logits float32 [T, E] -> ids int32 [T, k], weights float32 [T, k], best first; ties go to the lower "
        "index. "
        "bias float32 [E] ranks experts but does not weigh them. counts int64 [E] grows by the tokens of "
        "each.");
}

}  // namespace proa::bindings
