#include "runtime/stream_worker.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace proa::runtime {
namespace {

// Longer than a step needs from one layer to the next and from one step to the next; then the worker sleeps.
constexpr auto kAwake = std::chrono::milliseconds(20);
// A request that nobody announced is found at the end of a nap. Naps double up to the longest.
constexpr long kShortestNapNs = 50'000, kLongestNapNs = 2'000'000;
constexpr int kNapDoublings = 6;
constexpr int kPausesPerClockRead = 64;
constexpr size_t kPage = 4096;

void futex_nap(std::atomic<uint32_t>& word, uint32_t expected, long nanoseconds) noexcept {
  const timespec nap{0, nanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, &nap, nullptr, 0);
}

void pin_to(int cpu) noexcept {
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  // Refused: slower, still right.
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

size_t whole_pages(size_t bytes) noexcept { return (bytes + kPage - 1) / kPage * kPage; }

}  // namespace

StreamWorker::StreamWorker(std::shared_ptr<const CudaDriver> driver, HandOver hand_over, int max_jobs,
                           int cpu, ThreadPool* pool)
    : driver_(std::move(driver)), hand_over_(hand_over), pool_(pool) {
  const auto jobs = static_cast<size_t>(max_jobs);
  entries_.resize(jobs);
  // Pages of their own, since pages are what is pinned.
  const size_t bytes = whole_pages(base::Arena::padded(jobs * sizeof(uint32_t)) + jobs * sizeof(Done));
  arena_ = base::Arena(bytes + kPage);
  const auto start = reinterpret_cast<uintptr_t>(arena_.take<std::byte>(bytes + kPage).data());
  const uintptr_t first_page = (start + kPage - 1) / kPage * kPage;
  requests_ = {reinterpret_cast<std::atomic<uint32_t>*>(first_page), jobs};  // zeroed memory is their start
  done_ = {reinterpret_cast<Done*>(first_page + base::Arena::padded(jobs * sizeof(uint32_t))), jobs};
  if (hand_over == HandOver::kMemory) {
    pinned_ = {reinterpret_cast<void*>(first_page), bytes};
    driver_->pin({&pinned_, 1});
    pinned_device_ = driver_->device_address(pinned_.start);
  }
  thread_ = std::thread([this, cpu] { work(cpu); });
}

StreamWorker::~StreamWorker() {
  close();
  if (pinned_.start == nullptr) return;
  try {
    driver_->unpin(pinned_.start);
  } catch (const CudaError&) {  // the process is ending and the driver already has
  }
}

int StreamWorker::add(Job job, void* context) noexcept {
  const int number = num_jobs();
  if (number == static_cast<int>(entries_.size())) return -1;
  entries_[static_cast<size_t>(number)] = {this, job, context, number};
  num_jobs_.store(number + 1, std::memory_order_release);
  return number;
}

DeviceAddress StreamWorker::device(const void* word) const noexcept {
  return pinned_device_ +
         static_cast<DeviceAddress>(static_cast<const char*>(word) - static_cast<const char*>(pinned_.start));
}

void StreamWorker::submit(CudaStream stream, int job) {
  const auto i = static_cast<size_t>(job);
  if (hand_over_ == HandOver::kMemory)
    driver_->write_value(stream, device(&requests_[i]), 1);
  else
    driver_->launch_host_function(stream, &request_from_host, &entries_[i]);
}

void StreamWorker::wait(CudaStream stream, int job) {
  const auto i = static_cast<size_t>(job);
  if (hand_over_ == HandOver::kMemory) {
    driver_->wait_value(stream, device(&done_[i].word), 1);
    driver_->write_value(stream, device(&done_[i].word), 0);
  } else {
    driver_->launch_host_function(stream, &await_from_host, &entries_[i]);
  }
}

void StreamWorker::request_from_host(void* context) noexcept {
  const Entry& entry = *static_cast<Entry*>(context);
  entry.worker->requests_[static_cast<size_t>(entry.number)].store(1, std::memory_order_seq_cst);
  if (entry.worker->asleep_.load(std::memory_order_seq_cst)) entry.worker->resume();
}

void StreamWorker::await_from_host(void* context) noexcept {
  const Entry& entry = *static_cast<Entry*>(context);
  auto& done = entry.worker->done_[static_cast<size_t>(entry.number)].word;
  while (done.load(std::memory_order_acquire) == 0 &&
         !entry.worker->stopping_.load(std::memory_order_relaxed))
    __builtin_ia32_pause();
  done.store(0, std::memory_order_relaxed);
}

void StreamWorker::resume() noexcept {
  wake_.fetch_add(1, std::memory_order_seq_cst);
  if (asleep_.load(std::memory_order_seq_cst))
    syscall(SYS_futex, &wake_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

void StreamWorker::settle() noexcept {
  resume();
  // Busy is shown before a request is taken back, and until its job is announced.
  while (requested(-1) >= 0 || busy_.load(std::memory_order_acquire)) __builtin_ia32_pause();
  for (Done& done : done_) done.word.store(0, std::memory_order_release);
}

// The lowest requested job, beginning after the one that ran last; -1: none.
int StreamWorker::requested(int after) const noexcept {
  const int jobs = num_jobs();
  for (int i = 0, job = after; i < jobs; ++i) {
    if (++job >= jobs) job = 0;
    if (requests_[static_cast<size_t>(job)].load(std::memory_order_seq_cst) != 0) return job;
  }
  return -1;
}

void StreamWorker::set_awake(bool awake) noexcept {
  if (awake_ == awake) return;
  awake_ = awake;
  if (pool_ != nullptr) pool_->keep_awake(awake);
}

// `job`: the one that ran last, then the one to run. False: closing.
bool StreamWorker::await_request(int& job) noexcept {
  const int last = job;
  auto idle_since = std::chrono::steady_clock::now();
  for (int naps = 0;;) {
    const uint32_t seen = wake_.load(std::memory_order_acquire);
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if ((job = requested(last)) >= 0) {
        set_awake(true);
        return true;
      }
      __builtin_ia32_pause();
    }
    if (stopping_.load(std::memory_order_acquire)) return false;
    if (std::chrono::steady_clock::now() - idle_since < kAwake) continue;
    set_awake(false);
    // Shown before the requests are read again: either this thread sees a request made by a host function or
    // that function sees it asleep.
    asleep_.store(true, std::memory_order_seq_cst);
    if (requested(last) < 0 && !stopping_.load(std::memory_order_seq_cst))
      futex_nap(wake_, seen, std::min(kLongestNapNs, kShortestNapNs << std::min(naps, kNapDoublings)));
    asleep_.store(false, std::memory_order_relaxed);
    ++naps;
    if (wake_.load(std::memory_order_acquire) == seen) continue;
    set_awake(true);
    idle_since = std::chrono::steady_clock::now();
    naps = 0;
  }
}

void StreamWorker::run(int job) noexcept {
  const auto i = static_cast<size_t>(job);
  busy_.store(true, std::memory_order_relaxed);
  running_.store(job, std::memory_order_relaxed);
  requests_[i].exchange(0, std::memory_order_acq_rel);
  entries_[i].job(entries_[i].context);
  finished_.fetch_add(1, std::memory_order_relaxed);
  running_.store(-1, std::memory_order_relaxed);
  done_[i].word.store(1, std::memory_order_release);
  busy_.store(false, std::memory_order_release);
}

void StreamWorker::work(int cpu) noexcept {
  pthread_setname_np(pthread_self(), "proa-experts");  // for who looks into a process that hangs
  pin_to(cpu);
  set_awake(true);
  for (int job = -1; await_request(job);) run(job);
  set_awake(false);
}

void StreamWorker::close() noexcept {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  resume();
  thread_.join();
  for (Done& done : done_) done.word.store(1, std::memory_order_release);
}

}  // namespace proa::runtime
