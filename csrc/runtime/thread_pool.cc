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
// The caller leaves a worker's CPU at most this often, in case the system insists on putting it there.
constexpr auto kMovePause = std::chrono::milliseconds(1);

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Spins until `ready()` or until `limit` has passed and `longer()` is false; true when ready.
template <class Ready, class Longer>
bool spin_until(std::chrono::nanoseconds limit, Ready ready, Longer longer) noexcept {
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (ready()) return true;
      __builtin_ia32_pause();
    }
  } while (std::chrono::steady_clock::now() - start < limit || longer());
  return ready();
}

bool no_longer() noexcept { return false; }

bool has_cpu(const cpu_set_t& set, int cpu) noexcept {
  return cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(static_cast<size_t>(cpu), &set);
}

cpu_set_t set_of(const int* first, const int* last) noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int* cpu = first; cpu != last; ++cpu)
    if (*cpu >= 0 && *cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(*cpu), &set);
  return set;
}

// More workers than CPUs to run them: spinning would only keep the others from running.
bool oversubscribed(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  cpu_set_t used = set_of(cpus.data(), cpus.data() + cpus.size());
  CPU_AND(&used, &used, &allowed);
  return CPU_COUNT(&used) < static_cast<int>(cpus.size());
}

void pin_to(int cpu) noexcept {
  const cpu_set_t set = set_of(&cpu, &cpu + 1);
  // A CPU taken away by the cgroup since it was listed leaves the worker unpinned: slower, still right.
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

// One call after the other, numbered by a generation. Fork: the caller writes task and context, opens the
// gate of the new generation and then shows its number. A worker enters by counting itself at the gate, at
// most once per generation, and reads task and context only after that. Join: the caller waits until as many
// have left as entered; before that it waits for all to enter (run) or closes the gate (share). So nobody
// reads the plain fields while they are written.
struct ThreadPool::State {
  static constexpr uint64_t kClosed = uint64_t{1}
                                      << 31;  // below it: workers that entered; above it: generation
  static constexpr uint64_t kEntered = kClosed - 1;

  std::vector<int> cpus;
  std::vector<int> nodes;         // of each worker, numbered through
  std::vector<int> node_threads;  // workers of each node
  std::vector<int> system_nodes;
  cpu_set_t worker_cpus{};
  std::chrono::nanoseconds spin{};
  std::chrono::nanoseconds join_spin{};
  std::mutex callers;  // makes callers from several threads take turns
  Task task = nullptr;
  void* context = nullptr;
  bool stopping = false;
  std::chrono::steady_clock::time_point last_move{};
  std::atomic<int> caller_cpu{-1};
  std::atomic<bool> awake{false};
  alignas(64) std::atomic<uint64_t> gate{kClosed};
  alignas(64) std::atomic<uint32_t> generation{0};  // what workers wait on, changed after the gate
  alignas(64) std::atomic<int> sleepers{0};
  alignas(64) std::atomic<uint64_t> left{0};
  std::vector<std::thread> threads;

  int size() const noexcept { return static_cast<int>(cpus.size()); }

  void set_nodes(const std::vector<int>& given) {
    for (size_t i = 0; i < cpus.size(); ++i) {
      const int id = given.empty() ? -1 : given[i];
      const auto found = std::find(system_nodes.begin(), system_nodes.end(), id);
      const auto node = static_cast<size_t>(found - system_nodes.begin());
      if (found == system_nodes.end()) {
        system_nodes.push_back(id);
        node_threads.push_back(0);
      }
      nodes.push_back(static_cast<int>(node));
      ++node_threads[node];
    }
  }

  static uint32_t generation_of(uint64_t gate) noexcept { return static_cast<uint32_t>(gate >> 32); }

  // A sleeper counts itself before it waits and the caller reads the count after it published, both
  // sequentially consistent: either the caller sees the sleeper or the futex sees the new generation.
  void publish() noexcept {
    const uint32_t next = generation.load(std::memory_order_relaxed) + 1;
    left.store(0, std::memory_order_relaxed);
    gate.store(uint64_t{next} << 32, std::memory_order_release);
    generation.store(next, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(generation);
  }

  void await_change(uint32_t seen, int cpu) noexcept {
    const auto changed = [&] { return generation.load(std::memory_order_acquire) != seen; };
    for (;;) {
      // Spinning on the caller's own CPU would keep the work from arriving.
      const bool same_cpu = caller_cpu.load(std::memory_order_relaxed) == cpu;
      const auto kept_awake = [&] { return !same_cpu && awake.load(std::memory_order_relaxed); };
      if (spin_until(same_cpu ? std::chrono::nanoseconds(0) : spin, changed, kept_awake)) return;
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      if (generation.load(std::memory_order_seq_cst) == seen) futex_wait(generation, seen);
      sleepers.fetch_sub(1, std::memory_order_relaxed);
      if (changed()) return;
    }
  }

  void keep_awake(bool on) noexcept {
    if (spin == std::chrono::nanoseconds(0)) return;
    awake.store(on, std::memory_order_seq_cst);
    if (on && sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(generation);
  }

  // Whether the worker that has seen generation `seen` may run the task; moves `seen` to the gate's
  // generation.
  bool enter(uint32_t& seen) noexcept {
    uint64_t g = gate.load(std::memory_order_acquire);
    do {
      if (generation_of(g) == seen) return false;  // ahead of the number shown: entered before it was
      if ((g & kClosed) != 0) {
        seen = generation_of(g);
        return false;
      }
    } while (!gate.compare_exchange_weak(g, g + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    seen = generation_of(g);
    return true;
  }

  void work(int thread) noexcept {
    const int cpu = cpus[static_cast<size_t>(thread)];
    pin_to(cpu);
    for (uint32_t seen = 0;;) {
      await_change(seen, cpu);
      if (!enter(seen)) continue;
      if (stopping) return;
      task(context, thread, size());
      left.fetch_add(1, std::memory_order_release);
    }
  }

  void join(uint64_t entered) noexcept {
    const auto done = [&] { return left.load(std::memory_order_acquire) == entered; };
    if (spin_until(join_spin, done, no_longer)) return;
    while (!done()) sched_yield();
  }

  // The caller is not pinned, so the system may put it on a worker's CPU, where the two would take turns.
  // Narrowing its affinity to the caller's place for a moment moves it at once.
  void leave_worker_cpu() noexcept {
    int cpu = sched_getcpu();
    if (has_cpu(worker_cpus, cpu) && !has_cpu(worker_cpus, cpus.front())) {
      const auto now = std::chrono::steady_clock::now();
      cpu_set_t allowed;
      if (now - last_move > kMovePause && sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
          has_cpu(allowed, cpus.front())) {
        last_move = now;
        pin_to(cpus.front());
        sched_setaffinity(0, sizeof allowed, &allowed);
        cpu = sched_getcpu();
      }
    }
    caller_cpu.store(cpu, std::memory_order_relaxed);
  }

  void fork(Task new_task, void* new_context) noexcept {
    leave_worker_cpu();
    task = new_task;
    context = new_context;
    publish();
    task(context, 0, size());
  }

  void stop() noexcept {
    stopping = true;
    publish();
    for (std::thread& thread : threads) thread.join();
  }
};

ThreadPool::ThreadPool(std::vector<int> cpus, std::vector<int> nodes) : state_(std::make_unique<State>()) {
  if (cpus.empty()) cpus.push_back(-1);  // a pool always has the caller
  const bool crowded = oversubscribed(cpus);
  state_->spin = crowded ? std::chrono::nanoseconds(0) : std::chrono::nanoseconds(kSpin);
  state_->join_spin = crowded ? std::chrono::nanoseconds(0) : std::chrono::nanoseconds(kJoinSpin);
  state_->cpus = std::move(cpus);
  state_->set_nodes(nodes);
  state_->worker_cpus = set_of(state_->cpus.data() + 1, state_->cpus.data() + state_->cpus.size());
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

int ThreadPool::num_nodes() const noexcept { return static_cast<int>(state_->system_nodes.size()); }

int ThreadPool::node_of(int thread) const noexcept { return state_->nodes[static_cast<size_t>(thread)]; }

int ThreadPool::threads_of(int node) const noexcept {
  return state_->node_threads[static_cast<size_t>(node)];
}

int ThreadPool::system_node(int node) const noexcept {
  return state_->system_nodes[static_cast<size_t>(node)];
}

void ThreadPool::keep_awake(bool awake) noexcept { state_->keep_awake(awake); }

void ThreadPool::run(Task task, void* context) noexcept {
  State& s = *state_;
  if (s.size() == 1) return task(context, 0, 1);
  const std::lock_guard lock(s.callers);
  s.fork(task, context);
  s.join(static_cast<uint64_t>(s.size()) - 1);
}

void ThreadPool::share(Task task, void* context) noexcept {
  State& s = *state_;
  if (s.size() == 1) return task(context, 0, 1);
  const std::lock_guard lock(s.callers);
  s.fork(task, context);
  s.join(s.gate.fetch_or(State::kClosed, std::memory_order_acq_rel) & State::kEntered);
}

}  // namespace proa::runtime
