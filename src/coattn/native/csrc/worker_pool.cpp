#include "worker_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>

#include <cstdlib>
#include <new>
#include <utility>

#include "errors.h"

namespace coattn {
namespace {

thread_local bool inside_job = false;

void pin(pthread_t thread, int cpu) {
  cpu_set_t set;
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  // A cpuset that changed since we read it makes this fail; an unpinned worker is still a correct one.
  (void)pthread_setaffinity_np(thread, sizeof(set), &set);
}

// A job waits for its slowest worker, so other threads on the same cores should wait for workers. Needs a
// privilege; without it workers are ordinary threads. Not a real-time class: the system stops such threads
// for 50 ms a second when they spin.
void prefer_this_thread() {
  (void)setpriority(PRIO_PROCESS, 0, -10);
}

}  // namespace

Scratch::~Scratch() {
  std::free(data_);
}

std::byte* Scratch::get(size_t bytes) {
  if (bytes > size_) {
    const size_t rounded = (bytes + bytes / 2 + 4095) & ~size_t{4095};
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    data_ = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
    if (!data_) throw std::bad_alloc();
    size_ = rounded;
  }
  return data_;
}

WorkerPool::WorkerPool(int threads, int64_t spin_us)
    : threads_(threads),
      oversubscribed_(threads > static_cast<int>(usable_cpus().size())),
      cpus_(usable_cpus()),
      spin_ns_(spin_us * 1000) {
  if (threads < 1 || threads > 1024) {
    throw Refusal("A worker pool has between 1 and 1024 threads, not " + std::to_string(threads) + ".",
                  "Choose the number of cores the process may use.");
  }
  seats_ = std::make_unique<Seat[]>(threads);
  try {
    for (int w = 1; w < threads; ++w) {
      seats_[w].thread = std::thread([this, w] { loop(w); });
      // More workers than CPUs: let the scheduler place them, two pinned to one core would starve each other.
      if (!oversubscribed_) pin(seats_[w].thread.native_handle(), cpus_[w].id);
    }
  } catch (...) {
    stop_.store(true, std::memory_order_release);
    start_.advance();
    for (int w = 1; w < threads; ++w) {
      if (seats_[w].thread.joinable()) seats_[w].thread.join();
    }
    throw Refusal("The system refused to start " + std::to_string(threads) + " worker threads.",
                  "Ask for fewer threads or raise the process limit (ulimit -u).");
  }
}

WorkerPool::~WorkerPool() {
  std::lock_guard lock(run_mutex_);
  stop_.store(true, std::memory_order_release);
  start_.advance();
  for (int w = 1; w < threads_; ++w) seats_[w].thread.join();
}

std::vector<int> WorkerPool::cpus() const {
  std::lock_guard lock(run_mutex_);
  std::vector<int> ids{-1};
  for (int w = 1; w < threads_; ++w) ids.push_back(oversubscribed_ ? -1 : cpus_[w].id);
  return ids;
}

std::unique_lock<std::mutex> WorkerPool::pin_caller() {
  std::unique_lock seat(pinned_, std::try_to_lock);
  if (seat.owns_lock() && !oversubscribed_ && !cpus_.empty()) {
    std::lock_guard lock(run_mutex_);
    pin(pthread_self(), cpus_[0].id);
  }
  return seat;
}

void WorkerPool::seat_caller() {
  if (oversubscribed_) return;
  const int cpu = sched_getcpu();
  if (cpu == cpus_[0].id) return;
  for (int w = 1; w < threads_; ++w) {
    if (cpus_[w].id != cpu) continue;
    std::swap(cpus_[0], cpus_[w]);
    pin(seats_[w].thread.native_handle(), cpus_[w].id);
    return;
  }
}

void WorkerPool::execute(int worker) {
  inside_job = true;
  try {
    job_(ctx_, worker, threads_);
  } catch (...) {
    if (!failed_.exchange(true, std::memory_order_acq_rel)) error_ = std::current_exception();
  }
  inside_job = false;
}

void WorkerPool::loop(int worker) {
  prefer_this_thread();
  uint32_t seen = 0;
  while (true) {
    const uint32_t epoch = start_.wait_past(seen, spin_ns_.load(std::memory_order_relaxed), pauses());
    if (stop_.load(std::memory_order_acquire)) return;
    seen = epoch;
    uint32_t before = 2 * (epoch - 1);
    std::atomic<uint32_t>& state = seats_[worker].state;
    if (!state.compare_exchange_strong(before, 2 * epoch + 1, std::memory_order_acq_rel)) continue;
    execute(worker);
    state.store(2 * epoch, std::memory_order_release);
  }
}

void WorkerPool::run(Job job, void* ctx, Join join) {
  if (inside_job) {
    throw Refusal("A job of the worker pool tried to start another job.",
                  "Start it after the first has returned.");
  }
  std::lock_guard lock(run_mutex_);
  seat_caller();
  failed_.store(false, std::memory_order_relaxed);
  error_ = nullptr;
  job_ = job;
  ctx_ = ctx;
  const uint32_t epoch = start_.load() + 1;
  if (threads_ > 1) start_.advance();
  execute(0);
  for (int w = 1; w < threads_; ++w) {
    std::atomic<uint32_t>& state = seats_[w].state;
    uint32_t before = 2 * (epoch - 1);
    if (join == Join::willing && state.compare_exchange_strong(before, 2 * epoch, std::memory_order_acq_rel))
      continue;
    Backoff backoff(pauses());
    while (state.load(std::memory_order_acquire) != 2 * epoch) backoff.step();
  }
  if (failed_.load(std::memory_order_acquire)) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace coattn
