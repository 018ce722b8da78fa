// A CUDA driver for machines without one: streams do what they are told at once, on the caller's thread, and
// device memory is host memory. Built as a shared library by the tests that need it.
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr int kInvalidValue = 1, kHostMemoryAlreadyRegistered = 712, kHostMemoryNotRegistered = 713;
constexpr uintptr_t kPage = 4096;

std::mutex pinning;
std::map<uintptr_t, uintptr_t> pinned;  // start -> end

std::atomic<uint32_t>& word_at(uint64_t address) {
  return *reinterpret_cast<std::atomic<uint32_t>*>(static_cast<uintptr_t>(address));
}

bool shares_pages(uintptr_t a, uintptr_t a_end, uintptr_t b, uintptr_t b_end) {
  return a / kPage * kPage < b_end && b / kPage * kPage < a_end;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetErrorName(int code, const char** name) {
  *name = code == kInvalidValue                  ? "CUDA_ERROR_INVALID_VALUE"
          : code == kHostMemoryAlreadyRegistered ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
          : code == kHostMemoryNotRegistered     ? "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"
                                                 : nullptr;
  return *name == nullptr ? kInvalidValue : 0;
}
int cuCtxGetCurrent(void** context) {
  *context = nullptr;
  return 0;
}
int cuCtxSetCurrent(void*) { return 0; }
int cuLaunchHostFunc(void*, void (*function)(void*), void* context) {
  function(context);
  return 0;
}
int cuStreamWriteValue32_v2(void*, uint64_t address, uint32_t value, unsigned) {
  word_at(address).store(value, std::memory_order_release);
  return 0;
}
int cuStreamWaitValue32_v2(void*, uint64_t address, uint32_t value, unsigned) {
  while (word_at(address).load(std::memory_order_acquire) != value) sched_yield();
  return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t dst, const void* src, size_t bytes, void*) {
  std::memcpy(reinterpret_cast<void*>(static_cast<uintptr_t>(dst)), src, bytes);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void* dst, uint64_t src, size_t bytes, void*) {
  std::memcpy(dst, reinterpret_cast<const void*>(static_cast<uintptr_t>(src)), bytes);
  return 0;
}
int cuMemHostRegister_v2(void* start, size_t bytes, unsigned) {
  const auto first = reinterpret_cast<uintptr_t>(start);
  if (bytes == 0) return kInvalidValue;
  const std::lock_guard lock(pinning);
  for (const auto& [other, end] : pinned)
    if (shares_pages(first, first + bytes, other, end)) return kHostMemoryAlreadyRegistered;
  pinned[first] = first + bytes;
  return 0;
}
int cuMemHostUnregister(void* start) {
  const std::lock_guard lock(pinning);
  return pinned.erase(reinterpret_cast<uintptr_t>(start)) == 1 ? 0 : kHostMemoryNotRegistered;
}
int cuMemHostGetDevicePointer_v2(uint64_t* address, void* start, unsigned) {
  const auto first = reinterpret_cast<uintptr_t>(start);
  const std::lock_guard lock(pinning);
  for (const auto& [begin, end] : pinned)
    if (first >= begin && first < end) {
      *address = first;
      return 0;
    }
  return kInvalidValue;
}
}
