#include "runtime/thread_pool.h"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/topology.h"
#include "tests/check.h"

namespace {

using proa::runtime::ThreadPool;

// `count` workers over the CPUs at hand, more than there are if need be.
std::vector<int> cpus(size_t count) {
  const std::vector<int> allowed = proa::cpu::allowed_cpus();
  std::vector<int> chosen;
  for (size_t i = 0; i < count; ++i) chosen.push_back(allowed[i % allowed.size()]);
  return chosen;
}

void every_worker_runs_once_per_call(size_t threads, int calls) {
  ThreadPool pool(cpus(threads));
  CHECK_EQ(static_cast<size_t>(pool.num_threads()), threads);
  std::vector<int64_t> runs(threads, 0);  // plain: the pool must order the accesses
  int64_t total = 0;
  for (int call = 0; call < calls; ++call) {
    pool.parallel([&](int thread, int n) {
      CHECK_EQ(n, static_cast<int>(threads));
      ++runs[static_cast<size_t>(thread)];
    });
    total = 0;
    for (int64_t r : runs) total += r;
  }
  CHECK_EQ(total, static_cast<int64_t>(threads) * calls);
  for (int64_t r : runs) CHECK_EQ(r, calls);
}

void parallel_for_covers_every_index_once(size_t threads) {
  ThreadPool pool(cpus(threads));
  for (const int64_t n : {0, 1, 2, 7, 1000})
    for (const int64_t grain : {1, 3, 64, 5000}) {
      std::vector<int> hits(static_cast<size_t>(n), 0);
      pool.parallel_for(n, grain, [&](int64_t begin, int64_t end, int thread) {
        CHECK(thread >= 0 && thread < pool.num_threads());
        CHECK(begin < end && end - begin <= grain && end <= n);
        for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
      });
      for (int hit : hits) CHECK_EQ(hit, 1);
    }
}

void nodes_do_their_own_work(const std::vector<int>& nodes) {
  ThreadPool pool(cpus(nodes.size()), nodes);
  std::vector<int64_t> counts;
  int workers = 0;
  for (int node = 0; node < pool.num_nodes(); ++node) {
    counts.push_back(node == 1 ? 0 : 100 * node + 7);
    workers += pool.threads_of(node);
  }
  CHECK_EQ(workers, pool.num_threads());
  for (int call = 0; call < 50; ++call) {
    std::vector<std::vector<int>> hits;
    for (int64_t count : counts) hits.emplace_back(static_cast<size_t>(count));
    pool.parallel_for_nodes(counts, [&](int node, int64_t i, int thread) {
      CHECK_EQ(pool.node_of(thread), node);
      CHECK_EQ(pool.system_node(node), nodes[static_cast<size_t>(thread)]);
      ++hits[static_cast<size_t>(node)][static_cast<size_t>(i)];
    });
    for (const auto& of_node : hits)
      for (int n : of_node) CHECK_EQ(n, 1);
  }
}

// Workers that come late are left out, the others run at most once, and nobody runs after the call is over.
void shared_calls_wait_for_those_who_came(size_t threads, int calls) {
  ThreadPool pool(cpus(threads));
  struct Call {
    std::vector<int> runs;  // plain: the pool must order the accesses
  } call;
  for (int i = 0; i < calls; ++i) {
    call.runs.assign(threads, 0);
    pool.share([](void* context, int thread,
                  int) { ++static_cast<Call*>(context)->runs[static_cast<size_t>(thread)]; },
               &call);
    CHECK_EQ(call.runs[0], 1);
    for (int r : call.runs) CHECK(r == 0 || r == 1);
    if (i % 100 == 0) pool.parallel([&](int thread, int) { ++call.runs[static_cast<size_t>(thread)]; });
  }
}

// The CPU time that each of the pool's workers has taken. Thread 0 is the caller and not among them.
class WorkerClocks {
 public:
  explicit WorkerClocks(ThreadPool& pool) : clocks_(static_cast<size_t>(pool.num_threads())) {
    pool.parallel([&](int thread, int) {
      CHECK_EQ(pthread_getcpuclockid(pthread_self(), &clocks_[static_cast<size_t>(thread)]), 0);
    });
  }

  int64_t nanoseconds() const {
    int64_t sum = 0;
    for (size_t i = 1; i < clocks_.size(); ++i) {
      timespec t{};
      CHECK_EQ(clock_gettime(clocks_[i], &t), 0);
      sum += t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
    }
    return sum;
  }

  // Whether the workers come to rest: no CPU time at all in 200 ms. A worker that spins, or polls every
  // millisecond, never does; one that a busy machine has kept from going to sleep does later.
  bool come_to_rest() const {
    int64_t before = nanoseconds();
    for (int i = 0; i < 100; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      const int64_t now = nanoseconds();
      if (now == before) return true;
      before = now;
    }
    return false;
  }

 private:
  std::vector<clockid_t> clocks_;
};

// A pool without work takes no CPU, whatever the kind of its last call and the number of workers, and wakes
// again.
void idle_workers_sleep_and_wake(size_t threads) {
  ThreadPool pool(cpus(threads));
  const WorkerClocks clocks(pool);
  std::atomic<int> runs{0};
  CHECK(clocks.come_to_rest());
  pool.parallel([&](int, int) { ++runs; });
  CHECK_EQ(runs.load(), static_cast<int>(threads));
  CHECK(clocks.come_to_rest());
  pool.parallel_for(10, 1, [&](int64_t, int64_t, int) { ++runs; });
  CHECK_EQ(runs.load(), 10 + static_cast<int>(threads));
  CHECK(clocks.come_to_rest());
}

// Pauses around the length of the spin make workers go to sleep just as work arrives.
void work_arriving_at_bedtime_is_not_lost() {
  ThreadPool pool(cpus(2));
  std::atomic<int64_t> runs{0};
  for (int i = 0; i < 300; ++i) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(70 + i % 30);
    while (std::chrono::steady_clock::now() < until) {
    }
    pool.parallel([&](int, int) { ++runs; });
  }
  CHECK_EQ(runs.load(), 600);
}

void callers_take_turns() {
  ThreadPool pool(cpus(3));
  std::atomic<int> inside{0}, clashes{0};
  std::atomic<int64_t> runs{0};
  const auto call = [&] {
    for (int i = 0; i < 100; ++i)
      pool.parallel([&](int thread, int) {
        if (thread == 0 && ++inside > 1) ++clashes;
        ++runs;
        if (thread == 0) --inside;
      });
  };
  std::thread other(call);
  call();
  other.join();
  CHECK_EQ(clashes.load(), 0);
  CHECK_EQ(runs.load(), 600);
}

void pools_come_and_go() {
  for (int i = 0; i < 50; ++i) {
    ThreadPool pool(cpus(3));
    if (i % 2 == 0) pool.parallel([](int, int) {});
  }
  ThreadPool alone({});
  int runs = 0;
  alone.parallel([&](int thread, int n) { runs += thread == 0 && n == 1; });
  CHECK_EQ(runs, 1);
}

}  // namespace

int main() {
  every_worker_runs_once_per_call(1, 100);
  every_worker_runs_once_per_call(2, 5000);
  every_worker_runs_once_per_call(8, 200);  // more threads than most test machines have CPUs
  parallel_for_covers_every_index_once(1);
  parallel_for_covers_every_index_once(3);
  nodes_do_their_own_work({7});
  nodes_do_their_own_work({0, 0, 1});
  nodes_do_their_own_work({3, 1, 1, 3, 2, 9});
  shared_calls_wait_for_those_who_came(2, 20000);
  shared_calls_wait_for_those_who_came(5, 2000);
  idle_workers_sleep_and_wake(2);
  idle_workers_sleep_and_wake(15);
  work_arriving_at_bedtime_is_not_lost();
  callers_take_turns();
  pools_come_and_go();
  return proa::test::result();
}
