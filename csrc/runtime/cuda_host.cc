#include "runtime/cuda_host.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace proa::runtime {
namespace {

// cuda.h of the CUDA driver API.
constexpr int kSuccess = 0;
constexpr unsigned kRegisterPortable = 1, kRegisterDeviceMap = 2;
constexpr unsigned kWaitEqual = 1;
constexpr unsigned kWriteDefault = 0;

using Stream = void*;
using Context = void*;

Stream handle(CudaStream stream) noexcept { return reinterpret_cast<Stream>(stream); }

}  // namespace

struct CudaDriver::Functions {
  int (*init)(unsigned);
  int (*version)(int*);
  int (*error_name)(int, const char**);
  int (*get_context)(Context*);
  int (*set_context)(Context);
  int (*launch_host_function)(Stream, void (*)(void*), void*);
  int (*write_value)(Stream, DeviceAddress, uint32_t, unsigned);
  int (*wait_value)(Stream, DeviceAddress, uint32_t, unsigned);
  int (*copy_to_device)(DeviceAddress, const void*, size_t, Stream);
  int (*copy_to_host)(void*, DeviceAddress, size_t, Stream);
  int (*host_register)(void*, size_t, unsigned);
  int (*host_unregister)(void*);
  int (*device_pointer)(DeviceAddress*, void*, unsigned);
};

CudaDriver::CudaDriver(Library library, std::unique_ptr<const Functions> functions)
    : library_(std::move(library)), functions_(std::move(functions)) {}

CudaDriver::~CudaDriver() = default;

std::shared_ptr<const CudaDriver> CudaDriver::open(const std::string& library) {
  Library loaded(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL), &dlclose);
  if (loaded == nullptr)
    throw CudaMissing("[CudaDriver] expected the CUDA driver, got: " + std::string(dlerror()) +
                      ". Fix: install NVIDIA's driver");
  auto functions = std::make_unique<Functions>();
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(loaded.get(), name));
    if (function == nullptr)
      throw CudaMissing("[CudaDriver] expected a driver with " + std::string(name) + ", got '" + library +
                        "' without. Fix: install a driver of CUDA 12 or newer");
  };
  find(functions->init, "cuInit");
  find(functions->version, "cuDriverGetVersion");
  find(functions->error_name, "cuGetErrorName");
  find(functions->get_context, "cuCtxGetCurrent");
  find(functions->set_context, "cuCtxSetCurrent");
  find(functions->launch_host_function, "cuLaunchHostFunc");
  find(functions->write_value, "cuStreamWriteValue32_v2");
  find(functions->wait_value, "cuStreamWaitValue32_v2");
  find(functions->copy_to_device, "cuMemcpyHtoDAsync_v2");
  find(functions->copy_to_host, "cuMemcpyDtoHAsync_v2");
  find(functions->host_register, "cuMemHostRegister_v2");
  find(functions->host_unregister, "cuMemHostUnregister");
  find(functions->device_pointer, "cuMemHostGetDevicePointer_v2");
  std::shared_ptr<const CudaDriver> driver(new CudaDriver(std::move(loaded), std::move(functions)));
  driver->check(driver->functions_->init(0), "cuInit");
  return driver;
}

void CudaDriver::check(int code, const char* function) const {
  if (code == kSuccess) return;
  const char* name = nullptr;
  if (functions_->error_name(code, &name) != kSuccess || name == nullptr) name = "an unknown error";
  throw CudaError(
      "[" + std::string(function) + "] expected success, got " + name + " (" + std::to_string(code) + ")",
      code);
}

int CudaDriver::version() const {
  int version = 0;
  check(functions_->version(&version), "cuDriverGetVersion");
  return version;
}

void CudaDriver::launch_host_function(CudaStream stream, void (*function)(void*), void* context) const {
  check(functions_->launch_host_function(handle(stream), function, context), "cuLaunchHostFunc");
}

void CudaDriver::write_value(CudaStream stream, DeviceAddress word, uint32_t value) const {
  check(functions_->write_value(handle(stream), word, value, kWriteDefault), "cuStreamWriteValue32");
}

void CudaDriver::wait_value(CudaStream stream, DeviceAddress word, uint32_t value) const {
  check(functions_->wait_value(handle(stream), word, value, kWaitEqual), "cuStreamWaitValue32");
}

void CudaDriver::copy_to_device(CudaStream stream, DeviceAddress dst, const void* src, size_t bytes) const {
  check(functions_->copy_to_device(dst, src, bytes, handle(stream)), "cuMemcpyHtoDAsync");
}

void CudaDriver::copy_to_host(CudaStream stream, void* dst, DeviceAddress src, size_t bytes) const {
  check(functions_->copy_to_host(dst, src, bytes, handle(stream)), "cuMemcpyDtoHAsync");
}

void CudaDriver::pin(std::span<const HostRange> ranges, int num_threads) const {
  Context context = nullptr;
  check(functions_->get_context(&context), "cuCtxGetCurrent");
  std::atomic<size_t> next{0};
  std::vector<char> pinned(ranges.size(), 0);
  std::mutex failing;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      check(functions_->set_context(context), "cuCtxSetCurrent");
      for (size_t i; (i = next.fetch_add(1)) < ranges.size();) {
        check(functions_->host_register(ranges[i].start, ranges[i].bytes,
                                        kRegisterPortable | kRegisterDeviceMap),
              "cuMemHostRegister");
        pinned[i] = 1;
      }
    } catch (...) {
      next.store(ranges.size());
      const std::lock_guard lock(failing);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < std::min(num_threads, static_cast<int>(ranges.size())); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure == nullptr) return;
  for (size_t i = 0; i < ranges.size(); ++i)
    if (pinned[i] != 0) functions_->host_unregister(ranges[i].start);
  std::rethrow_exception(failure);
}

void CudaDriver::unpin(void* start) const {
  check(functions_->host_unregister(start), "cuMemHostUnregister");
}

DeviceAddress CudaDriver::device_address(void* pinned) const {
  DeviceAddress address = 0;
  check(functions_->device_pointer(&address, pinned, 0), "cuMemHostGetDevicePointer");
  return address;
}

}  // namespace proa::runtime
