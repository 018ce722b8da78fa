// A pinned fork/join pool. The calling thread is worker 0, so a pool of n CPUs starts n - 1 threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

namespace proa::runtime {

class ThreadPool {
 public:
  static constexpr int kMaxNodes = 64;

  // One worker per entry of `cpus` (logical CPU ids; the first is the caller's and is not pinned here).
  // nodes[i]: NUMA node of worker i, at most kMaxNodes different ones; empty: all on one.
  explicit ThreadPool(std::vector<int> cpus, std::vector<int> nodes = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const noexcept;
  // Nodes are numbered 0 .. num_nodes() - 1 here, in the order of their first workers.
  int num_nodes() const noexcept;
  int node_of(int thread) const noexcept;
  int threads_of(int node) const noexcept;
  int system_node(int node) const noexcept;  // the id it was given by; -1: all on one

  using Task = void (*)(void* context, int thread, int num_threads);
  // Runs `task` once on every worker and returns when all are done. Not reentrant; callers take turns.
  void run(Task task, void* context) noexcept;
  // Runs `task` on the caller and on those workers that come before the caller is through with it: a worker
  // that is asleep, or whose CPU another process holds, is not waited for. For tasks that hand out their work
  // among themselves and return when none is left. Not reentrant; callers take turns.
  void share(Task task, void* context) noexcept;

  // While `awake`, workers without work keep their CPUs instead of going to sleep, so that a call that comes
  // milliseconds after the last one starts at once. No effect with more workers than CPUs.
  void keep_awake(bool awake) noexcept;

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

  // f(node, index, thread) for the indexes [0, counts[node]) of every node, handed out dynamically among the
  // workers of that node and to no others. `counts` has num_nodes() entries.
  template <class F>
  void parallel_for_nodes(std::span<const int64_t> counts, F&& f) noexcept {
    struct alignas(64) Counter {
      std::atomic<int64_t> next{0};
    };
    Counter counters[kMaxNodes];
    auto pieces = [&](int thread, int) {
      const int node = node_of(thread);
      const int64_t count = counts[static_cast<size_t>(node)];
      for (int64_t i; (i = counters[node].next.fetch_add(1, std::memory_order_relaxed)) < count;)
        f(node, i, thread);
    };
    // With one node the caller can do whatever late workers leave; with several each node needs its own.
    if (num_nodes() == 1)
      share(&call<decltype(pieces)>, &pieces);
    else
      run(&call<decltype(pieces)>, &pieces);
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
