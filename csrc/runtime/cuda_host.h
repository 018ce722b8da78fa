// The host side of the CUDA driver, found at run time: no toolkit is needed to build, and everything else
// works without a GPU. Streams and device addresses are those of the caller's CUDA library (torch's, say) in
// this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

namespace proa::runtime {

// Bits of a CUstream; 0 is the default stream.
using CudaStream = uintptr_t;
using DeviceAddress = uint64_t;

// There is no driver, or one without a function this needs.
class CudaMissing : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The driver refused a call. `code` is its CUresult.
class CudaError : public std::runtime_error {
 public:
  CudaError(const std::string& text, int code) : std::runtime_error(text), code(code) {}
  int code;
};

struct HostRange {
  void* start = nullptr;
  size_t bytes = 0;
};

// Calls throw CudaError. Those on a stream only enqueue, and may be captured into a graph.
class CudaDriver {
 public:
  // `library` as for dlopen. Throws CudaMissing, and CudaError when the driver does not start.
  static std::shared_ptr<const CudaDriver> open(const std::string& library = "libcuda.so.1");
  ~CudaDriver();
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  int version() const;  // 13000: CUDA 13.0

  // `function` runs on a thread of the driver, must not call CUDA and holds the stream up until it returns.
  void launch_host_function(CudaStream stream, void (*function)(void*), void* context) const;
  // Everything before it on the stream is visible to whoever reads `value` there.
  void write_value(CudaStream stream, DeviceAddress word, uint32_t value) const;
  // Holds the stream up until the word equals `value`.
  void wait_value(CudaStream stream, DeviceAddress word, uint32_t value) const;
  void copy_to_device(CudaStream stream, DeviceAddress dst, const void* src, size_t bytes) const;
  void copy_to_host(CudaStream stream, void* dst, DeviceAddress src, size_t bytes) const;

  // Pins ranges, which must not share pages, with `num_threads` threads that take the caller's context. All
  // or none: what was pinned is let go when one is refused. Reads and writes by the device go straight to
  // them.
  void pin(std::span<const HostRange> ranges, int num_threads = 1) const;
  void unpin(void* start) const;
  // Where the device sees pinned memory.
  DeviceAddress device_address(void* pinned) const;

 private:
  struct Functions;
  using Library = std::unique_ptr<void, int (*)(void*)>;
  CudaDriver(Library library, std::unique_ptr<const Functions> functions);
  void check(int code, const char* function) const;

  Library library_;
  std::unique_ptr<const Functions> functions_;
};

}  // namespace proa::runtime
