// A pinned fork/join pool. The calling thread is worker 0, so a pool of n CPUs starts n - 1 threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace proa::runtime {

class ThreadPool {
 public:
  // One worker per entry of `cpus` (logical CPU ids; the first is the caller's and is not pinned here).
  explicit ThreadPool(std::vector<int> cpus);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept;

  using Task = void (*)(void* context, int thread, int num_threads);
  // Runs `task` once on every worker and returns when all are done. Not reentrant; callers take turns.
  void run(Task task, void* context) noexcept;
  // Runs `task` on the caller and on those workers that come before the caller is through with it: a worker
  // that is asleep, or whose CPU another process holds, is not waited for. For tasks that hand out their work
  // among themselves and return when none is left. Not reentrant; callers take turns.
  void share(Task task, void* context) noexcept;

  // f(thread, num_threads) on every worker.
  template <class F>
  void parallel(F&& f) noexcept {
    run(&call<std::remove_reference_t<F>>, const_cast<void*>(static_cast<const void*>(&f)));
  }

  // f(begin, end, thread) over [0, n) in pieces of at most `grain`, handed out dynamically; not every thread
  // need get one.
  template <class F>
  void parallel_for(int64_t n, int64_t grain, F&& f) noexcept {
    std::atomic<int64_t> next{0};
    auto pieces = [&](int thread, int) {
      for (int64_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < n;)
        f(begin, begin + grain < n ? begin + grain : n, thread);
    };
    share(&call<decltype(pieces)>, &pieces);
  }

 private:
  template <class F>
  static void call(void* context, int thread, int num_threads) {
    (*static_cast<F*>(context))(thread, num_threads);
  }

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace proa::runtime
