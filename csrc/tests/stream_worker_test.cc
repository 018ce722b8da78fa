#include "runtime/stream_worker.h"

#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/arena.h"
#include "cpu/topology.h"
#include "runtime/cuda_host.h"
#include "tests/check.h"

namespace {

using namespace std::chrono_literals;
using proa::runtime::CudaDriver;
using proa::runtime::CudaError;
using proa::runtime::CudaMissing;
using proa::runtime::HandOver;
using proa::runtime::HostRange;
using proa::runtime::StreamWorker;
using proa::runtime::ThreadPool;

constexpr HandOver kBoth[] = {HandOver::kMemory, HandOver::kHostFunction};

std::shared_ptr<const CudaDriver> fake() { return CudaDriver::open(PROA_FAKE_CUDA); }

template <class Error, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

void missing_drivers_are_named() {
  CHECK(
      contains(message_of<CudaMissing>([] { CudaDriver::open("no_such_driver.so"); }), "no_such_driver.so"));
  CHECK(contains(message_of<CudaMissing>([] { CudaDriver::open("libm.so.6"); }), "cuInit"));
}

// Pages are pinned once; a refused range leaves none of its call pinned.
void pinning_is_all_or_none() {
  const auto driver = fake();
  CHECK_EQ(driver->version(), 13000);
  constexpr size_t kBytes = 16 * 4096;
  proa::base::Arena arena(8 * kBytes);
  std::byte* start = arena.take<std::byte>(8 * kBytes).data();
  std::vector<HostRange> ranges;
  for (size_t i = 0; i < 8; ++i) ranges.push_back({start + i * kBytes, kBytes});
  driver->pin(ranges, 4);
  CHECK_EQ(driver->device_address(start + 5), reinterpret_cast<uintptr_t>(start) + 5);
  for (const HostRange& range : ranges) driver->unpin(range.start);
  CHECK(contains(message_of<CudaError>([&] { driver->unpin(start); }), "NOT_REGISTERED"));
  ranges.push_back(ranges[2]);
  CHECK(contains(message_of<CudaError>([&] { driver->pin(ranges, 3); }), "ALREADY_REGISTERED"));
  ranges.pop_back();
  driver->pin(ranges, 1);
  for (const HostRange& range : ranges) driver->unpin(range.start);
}

// What a job reads was written before it was submitted, what it writes is there after the wait.
struct Sum {
  ThreadPool* pool;
  std::vector<int64_t> in;
  int64_t out = 0;

  static void run(void* context) {
    auto& self = *static_cast<Sum*>(context);
    std::atomic<int64_t> sum{0};
    self.pool->parallel_for(static_cast<int64_t>(self.in.size()), 1, [&](int64_t begin, int64_t, int) {
      sum.fetch_add(self.in[static_cast<size_t>(begin)], std::memory_order_relaxed);
    });
    self.out = sum;
  }
};

void replays_run_every_job_each_time(HandOver hand_over, size_t threads) {
  const std::vector<int> allowed = proa::cpu::allowed_cpus();
  std::vector<int> cpus;
  for (size_t i = 0; i < threads; ++i) cpus.push_back(allowed[i % allowed.size()]);
  ThreadPool pool(cpus);
  std::vector<Sum> sums(5, Sum{&pool, std::vector<int64_t>(16), 0});
  StreamWorker worker(fake(), hand_over, 5, cpus.front(), &pool);
  for (Sum& sum : sums) CHECK_EQ(worker.add(&Sum::run, &sum), static_cast<int>(&sum - sums.data()));
  CHECK_EQ(worker.add(&Sum::run, &sums[0]), -1);
  CHECK_EQ(worker.num_jobs(), 5);
  constexpr int64_t kReplays = 30;
  for (int64_t replay = 0; replay < kReplays; ++replay) {
    worker.resume();
    for (int job = 0; job < 5; ++job) {
      Sum& sum = sums[static_cast<size_t>(job)];
      for (size_t i = 0; i < sum.in.size(); ++i) sum.in[i] = replay * job + static_cast<int64_t>(i);
      sum.out = -1;
      worker.submit(0, job);
      worker.wait(0, job);
      CHECK_EQ(sum.out, 16 * replay * job + 120);
    }
  }
  CHECK_EQ(worker.finished(), static_cast<uint64_t>(5 * kReplays));
  CHECK_EQ(worker.running(), -1);
}

// Two jobs requested before either is waited for.
void jobs_may_overlap(HandOver hand_over) {
  ThreadPool pool(std::vector<int>{proa::cpu::allowed_cpus().front()});
  std::vector<Sum> sums(2, Sum{&pool, {1, 2, 3}, 0});
  StreamWorker worker(fake(), hand_over, 2, -1, nullptr);
  for (Sum& sum : sums) worker.add(&Sum::run, &sum);
  for (int replay = 0; replay < 20; ++replay) {
    for (Sum& sum : sums) sum.out = 0;
    worker.submit(0, 0);
    worker.submit(0, 1);
    worker.wait(0, 1);
    worker.wait(0, 0);
    CHECK(sums[0].out == 6 && sums[1].out == 6);
  }
}

// A worker left alone comes to rest, and a request finds it whether announced or not.
void an_idle_worker_sleeps(HandOver hand_over) {
  Sum sum{nullptr, {}, 0};
  ThreadPool pool(std::vector<int>{proa::cpu::allowed_cpus().front()});
  sum.pool = &pool;
  StreamWorker worker(fake(), hand_over, 1, -1, nullptr);
  worker.add(&Sum::run, &sum);
  const auto cpu_seconds = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  };
  std::this_thread::sleep_for(300ms);
  const double before = cpu_seconds();
  std::this_thread::sleep_for(500ms);
  CHECK(cpu_seconds() - before < 0.1);
  for (const bool announced : {false, true}) {
    sum.out = -1;
    if (announced) worker.resume();
    worker.submit(0, 0);
    worker.wait(0, 0);
    CHECK_EQ(sum.out, 0);
    std::this_thread::sleep_for(100ms);
  }
}

// A forward that gave up between submit and wait leaves nothing that a later wait could take for its own.
void what_is_never_waited_for_is_forgotten(HandOver hand_over) {
  ThreadPool pool(std::vector<int>{proa::cpu::allowed_cpus().front()});
  std::vector<Sum> sums(3, Sum{&pool, {1, 2, 3}, 0});
  StreamWorker worker(fake(), hand_over, 3, -1, nullptr);
  for (Sum& sum : sums) worker.add(&Sum::run, &sum);
  for (int replay = 0; replay < 50; ++replay) {
    for (Sum& sum : sums) sum.out = 0;
    worker.submit(0, 0);
    worker.submit(0, 1);
    worker.settle();
    CHECK(sums[0].out == 6 && sums[1].out == 6 && sums[2].out == 0);
    for (Sum& sum : sums) sum.in[0] = -5;
    worker.submit(0, 0);
    worker.wait(0, 0);
    CHECK_EQ(sums[0].out, 0);
    for (Sum& sum : sums) sum.in[0] = 1;
  }
  worker.settle();
}

struct Gate {
  std::atomic<bool> started{false}, open{false};

  static void run(void* context) {
    auto& self = *static_cast<Gate*>(context);
    self.started = true;
    while (!self.open) std::this_thread::yield();
  }
};

// The watchdog's view of a job that hangs, and streams set free by close().
void a_stuck_job_shows(HandOver hand_over) {
  Gate gate;
  StreamWorker worker(fake(), hand_over, 2, -1, nullptr);
  worker.add(&Gate::run, &gate);
  worker.add(&Gate::run, &gate);
  worker.submit(0, 0);
  while (!gate.started) std::this_thread::yield();
  CHECK_EQ(worker.running(), 0);
  CHECK_EQ(worker.finished(), uint64_t{0});
  std::thread stream([&] { worker.wait(0, 1); });  // never submitted
  gate.open = true;
  worker.wait(0, 0);
  worker.close();
  stream.join();
  CHECK_EQ(worker.finished(), uint64_t{1});
}

}  // namespace

int main() {
  missing_drivers_are_named();
  pinning_is_all_or_none();
  for (const HandOver hand_over : kBoth) {
    for (const size_t threads : {1, 2}) replays_run_every_job_each_time(hand_over, threads);
    jobs_may_overlap(hand_over);
    an_idle_worker_sleeps(hand_over);
    what_is_never_waited_for_is_forgotten(hand_over);
    a_stuck_job_shows(hand_over);
  }
  return proa::test::result();
}
