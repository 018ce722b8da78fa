// The thread pool as Python sees it.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "runtime/thread_pool.h"

namespace proa::bindings {

// Bound as `ThreadPool`. A call holds the pool it started with, so close() from another thread never pulls it
// away.
struct Pool {
  std::shared_ptr<runtime::ThreadPool> threads;

  std::shared_ptr<runtime::ThreadPool> use() const {
    if (threads == nullptr)
      throw std::invalid_argument("[ThreadPool] expected an open pool, got a closed one");
    return threads;
  }
};

// Throws std::invalid_argument unless `cpus` names at least one CPU and only such as this process may use.
void check_cpus(const char* function, const std::vector<int>& cpus);

}  // namespace proa::bindings
