#include "runtime/thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <mutex>
#include <thread>
#include <utility>

namespace proa::runtime {
namespace {

// Native calls of one forward pass follow each other within tens of microseconds: a worker that spins this
// long catches the next one without a system call, and a pool with no work sleeps.
constexpr auto kSpin = std::chrono::microseconds(80);
// The caller gives its CPU away at the join after this long, in case a worker waits for that very CPU.
constexpr auto kJoinSpin = std::chrono::microseconds(20);
constexpr int kPausesPerClockRead = 16;

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Spins until `ready()` or until `limit` has passed; true when ready.
template <class Ready>
bool spin_until(std::chrono::nanoseconds limit, Ready ready) noexcept {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (ready()) return true;
      __builtin_ia32_pause();
    }
  } while (std::chrono::steady_clock::now() - start < limit);
  return ready();
}

// More workers than CPUs to run them: spinning would only keep the others from running.
bool oversubscribed(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  cpu_set_t used;
  CPU_ZERO(&used);
  for (int cpu : cpus)
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &used);
  CPU_AND(&used, &used, &allowed);
  return CPU_COUNT(&used) < static_cast<int>(cpus.size());
}

void pin_to(int cpu) noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  CPU_SET(static_cast<size_t>(cpu), &set);
  // A CPU taken away by the cgroup since it was listed leaves the worker unpinned: slower, still right.
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

// Fork: the caller writes task, context and pending, then adds 1 to generation. Join: each worker subtracts 1
// from pending. A worker reads the task only after it saw the new generation, and the caller writes the next
// one only after pending reached 0, so the plain fields are never raced for.
struct ThreadPool::State {
  std::vector<int> cpus;
  std::chrono::nanoseconds spin{};
  std::chrono::nanoseconds join_spin{};
  std::mutex callers;  // makes callers from several threads take turns
  Task task = nullptr;
  void* context = nullptr;
  bool stopping = false;
  alignas(64) std::atomic<uint32_t> generation{0};
  alignas(64) std::atomic<int> sleepers{0};
  alignas(64) std::atomic<int> pending{0};
  std::vector<std::thread> threads;

  int size() const noexcept { return static_cast<int>(cpus.size()); }

  // A sleeper counts itself before it waits and the caller reads the count after it published, both
  // sequentially consistent: either the caller sees the sleeper or the futex sees the new generation.
  void publish() noexcept {
    generation.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(generation);
  }

  void await_change(uint32_t seen) noexcept {
    const auto changed = [&] { return generation.load(std::memory_order_acquire) != seen; };
    if (spin_until(spin, changed)) return;
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (generation.load(std::memory_order_seq_cst) == seen) futex_wait(generation, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }

  void work(int thread) noexcept {
    pin_to(cpus[static_cast<size_t>(thread)]);
    for (uint32_t seen = 0;; ++seen) {
      await_change(seen);
      if (stopping) return;
      task(context, thread, size());
      pending.fetch_sub(1, std::memory_order_release);
    }
  }

  void join() noexcept {
    const auto done = [&] { return pending.load(std::memory_order_acquire) == 0; };
    if (spin_until(join_spin, done)) return;
    while (!done()) sched_yield();
  }

  void stop() noexcept {
    stopping = true;
    publish();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(std::vector<int> cpus) : state_(std::make_unique<State>()) {
  if (cpus.empty()) cpus.push_back(-1);  // a pool always has the caller
  const bool crowded = oversubscribed(cpus);
  state_->spin = crowded ? std::chrono::nanoseconds(0) : std::chrono::nanoseconds(kSpin);
  state_->join_spin = crowded ? std::chrono::nanoseconds(0) : std::chrono::nanoseconds(kJoinSpin);
  state_->cpus = std::move(cpus);
  state_->threads.reserve(state_->cpus.size() - 1);
  try {
    for (int i = 1; i < state_->size(); ++i)
      state_->threads.emplace_back([s = state_.get(), i] { s->work(i); });
  } catch (...) {  // the system refused a thread
    state_->stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { state_->stop(); }

int ThreadPool::num_threads() const noexcept { return state_->size(); }

void ThreadPool::run(Task task, void* context) noexcept {
  State& s = *state_;
  if (s.size() == 1) {
    task(context, 0, 1);
    return;
  }
  const std::lock_guard lock(s.callers);
  s.task = task;
  s.context = context;
  s.pending.store(s.size() - 1, std::memory_order_relaxed);
  s.publish();
  task(context, 0, s.size());
  s.join();
}

}  // namespace proa::runtime
