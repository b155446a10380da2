#include "runtime.h"

#include <pthread.h>

#include <chrono>
#include <utility>
#include <vector>

#include "errors.h"
#include "fault.h"

namespace coattn {
namespace {

// fork() copies one thread only: the child must not touch the parent's pool, and must not inherit a lock held
// by a thread that no longer exists. So fork waits for the running job, and the child forgets (leaks) the old
// runtime.
struct Global {
  std::mutex mutex;
  std::shared_ptr<Runtime> runtime;
  std::unique_lock<std::mutex> fork_lock, fork_run_lock;
  int threads = 0;
};

Global& global() {
  static Global state;
  return state;
}

void before_fork() {
  Global& g = global();
  g.fork_lock = std::unique_lock(g.mutex);
  if (g.runtime) g.fork_run_lock = std::unique_lock(g.runtime->pool.run_mutex());
}

void after_fork_parent() {
  Global& g = global();
  g.fork_run_lock = {};
  g.fork_lock = {};
}

void after_fork_child() {
  Global& g = global();
  if (g.runtime) new std::shared_ptr<Runtime>(std::move(g.runtime));
  g.runtime.reset();
  g.fork_run_lock = {};
  g.fork_lock = {};
}

}  // namespace

AsyncQueue::~AsyncQueue() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  posted_.advance();
  if (thread_.joinable()) thread_.join();
}

uint64_t AsyncQueue::submit(std::function<void(WorkerPool&)> job) {
  uint64_t ticket;
  {
    std::lock_guard lock(mutex_);
    ticket = next_++;
    entries_[ticket].job = std::move(job);
    waiting_.push_back(ticket);
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  posted_.advance();
  return ticket;
}

void AsyncQueue::loop() {
  const auto seat = pool_.pin_caller();
  uint32_t seen = posted_.load();
  while (true) {
    std::unique_lock lock(mutex_);
    if (waiting_.empty()) {
      if (stop_) return;
      lock.unlock();
      seen = posted_.wait_past(seen, 50'000, 64);
      continue;
    }
    const uint64_t ticket = waiting_.front();
    waiting_.pop_front();
    std::function<void(WorkerPool&)> job = std::move(entries_[ticket].job);
    lock.unlock();
    std::exception_ptr error;
    try {
      if (take_fault() == Fault::die) return;
      job(pool_);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    entries_[ticket].error = error;
    entries_[ticket].done = true;
    finished_.notify_all();
  }
}

bool AsyncQueue::wait(uint64_t ticket, int64_t timeout_us) {
  std::unique_lock lock(mutex_);
  if (!entries_.contains(ticket)) {
    throw Refusal("Ticket " + std::to_string(ticket) + " is not waiting here.",
                  "Wait for each ticket once, in the process that submitted it.");
  }
  const auto done = [&] { return entries_[ticket].done; };
  if (timeout_us == 0) {
    finished_.wait(lock, done);
  } else if (!finished_.wait_for(lock, std::chrono::microseconds(timeout_us), done)) {
    return false;
  }
  std::exception_ptr error = entries_[ticket].error;
  entries_.erase(ticket);
  if (error) std::rethrow_exception(error);
  return true;
}

std::shared_ptr<Runtime> runtime() {
  Global& g = global();
  static const int registered = pthread_atfork(before_fork, after_fork_parent, after_fork_child);
  (void)registered;
  std::lock_guard lock(g.mutex);
  if (!g.runtime) g.runtime = std::make_shared<Runtime>(g.threads > 0 ? g.threads : default_threads());
  return g.runtime;
}

WorkerPool& lone_pool() {
  thread_local WorkerPool pool(1);
  return pool;
}

void set_threads(int threads) {
  std::shared_ptr<Runtime> old;
  Global& g = global();
  std::lock_guard lock(g.mutex);
  if (threads < 0 || threads > 1024) {
    throw Refusal("The thread count must lie between 0 and 1024, not be " + std::to_string(threads) + ".",
                  "0 means one thread per core that the process may use.");
  }
  g.threads = threads;
  old = std::exchange(g.runtime, nullptr);
}

void abandon_pool() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  // Kept on purpose, never destroyed: its destructor would wait for the stuck worker.
  static auto* abandoned = new std::vector<std::shared_ptr<Runtime>>;
  if (g.runtime) abandoned->push_back(std::exchange(g.runtime, nullptr));
}

}  // namespace coattn
