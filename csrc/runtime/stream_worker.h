// A CPU thread that runs jobs when a CUDA stream, or a graph captured from one, gets to them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "base/arena.h"
#include "runtime/cuda_host.h"
#include "runtime/thread_pool.h"

namespace proa::runtime {

// How a stream tells the worker to start and learns that it is done.
enum class HandOver : uint8_t {
  kMemory,        // stream memory operations on words that the worker polls
  kHostFunction,  // host functions, the second of which holds a thread of the driver up
};

// A job has two words: the stream sets `request` to 1, the worker takes it back to 0, runs the job and sets
// `done` to 1; the stream waits for that and takes it back to 0. All values are constants, so a graph may be
// replayed any number of times, and nothing is allocated, locked or queued in a step.
//
// Streams submit a job and wait for it in turn. Several jobs may be requested at once; the worker then takes
// the one whose number is next after that of the job it ran last.
class StreamWorker {
 public:
  using Job = void (*)(void* context);

  // The worker runs on `cpu` (-1: anywhere), which should be that of worker 0 of `pool`. `pool`, if any, must
  // outlive it; its workers stay awake while this one is. Throws CudaError and std::bad_alloc.
  StreamWorker(std::shared_ptr<const CudaDriver> driver, HandOver hand_over, int max_jobs, int cpu,
               ThreadPool* pool);
  ~StreamWorker();
  StreamWorker(const StreamWorker&) = delete;
  StreamWorker& operator=(const StreamWorker&) = delete;

  // The number of a job that calls job(context), which must not throw; at most max_jobs, -1 when there are as
  // many already. `context` must outlive the worker.
  int add(Job job, void* context) noexcept;

  // Enqueue on a stream. Throw CudaError.
  void submit(CudaStream stream, int job);
  void wait(CudaStream stream, int job);

  // Before a step: a worker that has had nothing to do for kAwake sleeps and would see memory operations
  // late.
  void resume() noexcept;

  // After submits without their waits, which must not be on any stream any more: ends these jobs and takes
  // back what they announce, so that the next waits are for the next submits.
  void settle() noexcept;

  // For a watchdog: jobs done since the start, and the one that runs (-1: none).
  uint64_t finished() const noexcept { return finished_.load(std::memory_order_relaxed); }
  int running() const noexcept { return running_.load(std::memory_order_relaxed); }
  HandOver hand_over() const noexcept { return hand_over_; }
  int num_jobs() const noexcept { return num_jobs_.load(std::memory_order_acquire); }

  // Ends the thread after the job that runs. Streams that wait now go on with what their jobs left behind;
  // nothing may be submitted any more.
  void close() noexcept;

 private:
  struct Entry {
    StreamWorker* worker;
    Job job;
    void* context;
    int number;
  };
  // Written by the worker and polled by the device, hence a cache line of its own.
  struct alignas(64) Done {
    std::atomic<uint32_t> word{0};
  };

  void work(int cpu) noexcept;
  int requested(int after) const noexcept;
  void run(int job) noexcept;
  bool await_request(int& job) noexcept;
  void set_awake(bool awake) noexcept;

  static void request_from_host(void* entry) noexcept;
  static void await_from_host(void* entry) noexcept;
  DeviceAddress device(const void* word) const noexcept;

  std::shared_ptr<const CudaDriver> driver_;
  HandOver hand_over_;
  ThreadPool* pool_;
  std::vector<Entry> entries_;
  base::Arena arena_;
  HostRange pinned_;
  DeviceAddress pinned_device_ = 0;
  std::span<std::atomic<uint32_t>> requests_;
  std::span<Done> done_;
  std::atomic<int> num_jobs_{0};
  std::atomic<uint64_t> finished_{0};
  std::atomic<int> running_{-1};
  std::atomic<bool> busy_{false};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> wake_{0};
  std::atomic<bool> asleep_{false};
  bool awake_ = false;  // of the worker's thread
  std::thread thread_;
};

}  // namespace proa::runtime
