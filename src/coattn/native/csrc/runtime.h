// The process's pool and its queue of asynchronous jobs, made on first use and made anew in a forked child.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "worker_pool.h"

namespace coattn {

// First in, first out. Its thread is worker 0 of the pool while it runs a job, so N workers stay N busy
// threads.
class AsyncQueue {
 public:
  explicit AsyncQueue(WorkerPool& pool) : pool_(pool) {}
  ~AsyncQueue();

  // What the job points to must stay alive until wait(ticket) has returned.
  uint64_t submit(std::function<void(WorkerPool&)> job);
  // Rethrows the job's exception. A ticket can be waited for once. False: not done within `timeout_us` (0: no
  // limit).
  bool wait(uint64_t ticket, int64_t timeout_us = 0);

 private:
  friend struct Runtime;
  void loop();

  struct Entry {
    std::function<void(WorkerPool&)> job;
    std::exception_ptr error;
    bool done = false;
  };

  WorkerPool& pool_;
  std::mutex mutex_;
  std::condition_variable finished_;
  std::map<uint64_t, Entry> entries_;
  std::deque<uint64_t> waiting_;
  uint64_t next_ = 1;
  bool stop_ = false;
  EventWord posted_;
  std::thread thread_;
};

struct Runtime {
  explicit Runtime(int threads) : pool(threads), queue(pool) {}
  WorkerPool pool;
  AsyncQueue queue;  // after the pool: destroyed before it
};

// Callers keep the pointer while they use it, so that set_threads() can replace the pool at any time.
std::shared_ptr<Runtime> runtime();

// A pool of the calling thread alone: for work beside the steps of others, who need the process's pool.
WorkerPool& lone_pool();

// 0 returns to default_threads(). Jobs already submitted finish on the old pool.
void set_threads(int threads);

// Forgets the pool, whose workers may never come back, without waiting for it; the next call makes a new one.
void abandon_pool();

}  // namespace coattn
