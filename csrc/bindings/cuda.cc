// CudaDriver and StreamWorker. Streams and device addresses are integers, as torch gives them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/expert_layer.h"
#include "bindings/pool.h"
#include "moe/expert_job.h"
#include "runtime/cuda_host.h"
#include "runtime/stream_worker.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace proa::bindings {
namespace {

using runtime::CudaDriver;
using runtime::CudaStream;
using runtime::DeviceAddress;

constexpr int kMaxJobs = 1 << 16;
constexpr int kMaxPinThreads = 64;

[[noreturn]] void refuse(const char* function, const std::string& expected, const std::string& got) {
  throw std::invalid_argument(std::string("[") + function + "] expected " + expected + ", got " + got);
}

struct BoundDriver {
  std::shared_ptr<const CudaDriver> driver;

  explicit BoundDriver(const std::string& library) : driver(CudaDriver::open(library)) {}

  void pin(const std::vector<std::pair<uintptr_t, size_t>>& ranges, int num_threads) const {
    if (num_threads < 1 || num_threads > kMaxPinThreads)
      refuse("CudaDriver.pin", "num_threads in 1 .. 64", std::to_string(num_threads));
    std::vector<runtime::HostRange> pinned;
    for (const auto& [start, bytes] : ranges) pinned.push_back({reinterpret_cast<void*>(start), bytes});
    nb::gil_scoped_release release;
    driver->pin(pinned, num_threads);
  }
};

runtime::HandOver parse_hand_over(const std::string& name) {
  if (name == "memory") return runtime::HandOver::kMemory;
  if (name == "host_function") return runtime::HandOver::kHostFunction;
  refuse("StreamWorker", "hand_over 'memory' or 'host_function'", "'" + name + "'");
}

// The worker with what its jobs use.
class BoundWorker {
 public:
  BoundWorker(const BoundDriver& driver, const Pool& pool, int cpu, const std::string& hand_over,
              int max_jobs)
      : pool_(pool.use()) {
    if (max_jobs < 1 || max_jobs > kMaxJobs)
      refuse("StreamWorker", "max_jobs in 1 .. 65536", std::to_string(max_jobs));
    worker_ = std::make_unique<runtime::StreamWorker>(driver.driver, parse_hand_over(hand_over), max_jobs,
                                                      cpu, pool_.get());
    jobs_.reserve(static_cast<size_t>(max_jobs));
  }

  int add(nb::object layer, nb::object x, nb::object ids, nb::object weights, nb::object out,
          nb::object tokens, bool accumulate) {
    constexpr const char* kName = "StreamWorker.add";
    auto job = std::make_unique<Job>(kName, std::move(layer), std::move(x), std::move(ids),
                                     std::move(weights), std::move(out), std::move(tokens), accumulate);
    const int number = worker_->add(&moe::ExpertJob::run_job, &job->job);
    if (number < 0) refuse(kName, "at most max_jobs jobs", "one more");
    jobs_.push_back(std::move(job));
    return number;
  }

  void submit(CudaStream stream, int job) {
    check("StreamWorker.submit", job);
    nb::gil_scoped_release release;
    worker_->submit(stream, job);
  }

  void wait(CudaStream stream, int job) {
    check("StreamWorker.wait", job);
    nb::gil_scoped_release release;
    worker_->wait(stream, job);
  }

  void settle() {
    nb::gil_scoped_release release;
    worker_->settle();
  }

  void close() {
    nb::gil_scoped_release release;
    worker_->close();
  }

  std::pair<int64_t, int64_t> slots(int job) const {
    check("StreamWorker.slots", job);
    const moe::ExpertJob& of = jobs_[static_cast<size_t>(job)]->job;
    return {of.slots(), of.own_slots()};
  }

  double seconds(int job) const {
    check("StreamWorker.seconds", job);
    return 1e-9 * static_cast<double>(jobs_[static_cast<size_t>(job)]->job.nanoseconds());
  }

  int64_t faults() const {
    int64_t faults = 0;
    for (const auto& job : jobs_) faults += job->job.faults();
    return faults;
  }

  runtime::StreamWorker& worker() const { return *worker_; }

 private:
  struct Job {
    Job(const char* function, nb::object layer_object, nb::object x, nb::object ids, nb::object weights,
        nb::object out, nb::object tokens_object, bool accumulate)
        : layer(expert_layer_of(function, layer_object)),
          batch(function, layer, x, ids, weights, out, accumulate),
          tokens(function, "tokens", tokens_object, Access::kRead),
          job(layer, batch.batch(), tokens.expect(DType::kI32, {1}).data<const int32_t>()),
          keep{std::move(layer_object), std::move(x),   std::move(ids),
               std::move(weights),      std::move(out), std::move(tokens_object)} {}

    moe::ExpertLayer& layer;
    BoundBatch batch;
    Array tokens;
    moe::ExpertJob job;
    nb::object keep[6];
  };

  void check(const char* function, int job) const {
    if (job < 0 || job >= static_cast<int>(jobs_.size()))
      refuse(function, "the number of a job", std::to_string(job));
  }

  std::shared_ptr<runtime::ThreadPool> pool_;
  std::vector<std::unique_ptr<Job>> jobs_;
  std::unique_ptr<runtime::StreamWorker> worker_;  // ends before what its jobs use
};

}  // namespace

void init_cuda(nb::module_& m) {
  nb::exception<runtime::CudaMissing>(m, "CudaMissing");
  nb::exception<runtime::CudaError>(m, "CudaError");
  nb::class_<BoundDriver>(m, "CudaDriver", "The CUDA driver of this machine; CudaMissing without one.")
      .def(nb::init<const std::string&>(), "library"_a = "libcuda.so.1")
      .def_prop_ro("version", [](const BoundDriver& d) { return d.driver->version(); })
      .def("pin", &BoundDriver::pin, "ranges"_a, "num_threads"_a = 1,
           "Pins (address, bytes) ranges that share no pages, all or none, for reads and writes by the "
           "device.")
      .def(
          "unpin",
          [](const BoundDriver& d, uintptr_t start) { d.driver->unpin(reinterpret_cast<void*>(start)); },
          "start"_a)
      .def(
          "device_address",
          [](const BoundDriver& d, uintptr_t start) {
            return d.driver->device_address(reinterpret_cast<void*>(start));
          },
          "start"_a, "Where the device sees pinned memory.")
      .def(
          "copy_to_device",
          [](const BoundDriver& d, CudaStream stream, DeviceAddress dst, uintptr_t src, size_t bytes) {
            d.driver->copy_to_device(stream, dst, reinterpret_cast<const void*>(src), bytes);
          },
          "stream"_a, "dst"_a, "src"_a, "nbytes"_a)
      .def(
          "copy_to_host",
          [](const BoundDriver& d, CudaStream stream, uintptr_t dst, DeviceAddress src, size_t bytes) {
            d.driver->copy_to_host(stream, reinterpret_cast<void*>(dst), src, bytes);
          },
          "stream"_a, "dst"_a, "src"_a, "nbytes"_a);
  nb::class_<BoundWorker>(m, "StreamWorker",
                          "A CPU thread that runs forwards of expert layers when a CUDA stream, or a graph "
                          "captured from one, gets to them.")
      .def(nb::init<const BoundDriver&, const Pool&, int, const std::string&, int>(), "driver"_a, "pool"_a,
           "cpu"_a = -1, "hand_over"_a = "memory", "max_jobs"_a = 4096,
           "cpu: where the thread runs, that of worker 0 of the pool; -1: anywhere. hand_over: 'memory' "
           "(stream "
           "memory operations, polled by the thread) or 'host_function'.")
      .def("add", &BoundWorker::add, "layer"_a, "x"_a, "ids"_a, "weights"_a, "out"_a, "tokens"_a,
           "accumulate"_a = false,
           "The number of a job that is ExpertLayer.forward of the first tokens[0] rows of these arrays, "
           "which "
           "the device writes and reads at their addresses. tokens int32 [1].")
      .def("submit", &BoundWorker::submit, "stream"_a, "job"_a)
      .def("wait", &BoundWorker::wait, "stream"_a, "job"_a)
      .def(
          "resume", [](BoundWorker& w) { w.worker().resume(); }, "Before a step that submits.")
      .def("settle", &BoundWorker::settle,
           "After submits whose waits never came, with nothing left on the streams: their jobs end and are "
           "forgotten.")
      .def("close", &BoundWorker::close)
      .def_prop_ro(
          "finished", [](const BoundWorker& w) { return w.worker().finished(); },
          "Jobs done since the start.")
      .def_prop_ro(
          "running", [](const BoundWorker& w) { return w.worker().running(); }, "The job that runs, or -1.")
      .def("slots", &BoundWorker::slots, "job"_a,
           "Totals of a job: slots of tokens, and those of them whose expert it computed.")
      .def("seconds", &BoundWorker::seconds, "job"_a, "That all runs of a job have taken.")
      .def_prop_ro("faults", &BoundWorker::faults,
                   "How many ids of experts that are not loaded jobs were given.");
}

}  // namespace proa::bindings
