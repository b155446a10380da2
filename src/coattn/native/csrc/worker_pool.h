// N pinned workers and one barrier per job. The calling thread is worker 0; the pool owns threads 1..N-1.
//
//   word / field     writer -> reader         meaning
//   job_, ctx_       caller -> workers        the job; written before start_ advances, read after entering it
//   start_           caller -> workers        e: how many jobs there were; its futex wakes who sleeps
//   seat[w].state    worker w and caller      2 e: job e is over for worker w; 2 e + 1: worker w is inside it
//   seat[w].scratch  worker w                 nobody else touches it
//   failed_          workers -> caller        who sets it first may write error_; reset before start_
//   error_           that worker -> caller    published by its state, rethrown by run()
//   stop_            destructor -> workers    written before start_ advances for the last time
//   spin_ns_         anybody -> workers       how long they spin before they sleep; orders nothing
//   cpus_            under run_mutex_         where workers are pinned; [0] is the caller's
//
// Worker w enters job e by changing its state from 2 (e - 1) to 2 e + 1, and only then reads job_ and ctx_.
// The caller may reuse them once every state is 2 e; that wait is the barrier. In a job whose work is claimed
// piece by piece the caller does not wait for workers that have not entered when nothing is left to claim: it
// changes their state from 2 (e - 1) to 2 e itself, so that they cannot enter. A worker that the system keeps
// from running then delays nobody.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "spin.h"
#include "topology.h"

namespace coattn {

// 64-byte aligned memory of one worker, grown on demand and never shrunk: jobs need no allocation once warm.
class Scratch {
 public:
  ~Scratch();
  std::byte* get(size_t bytes);

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

enum class Join {
  all,      // every worker must run the job: its work is divided by worker number
  willing,  // workers claim pieces; who comes too late for one may stay away
};

class WorkerPool {
 public:
  using Job = void (*)(void* ctx, int worker, int workers);

  explicit WorkerPool(int threads, int64_t spin_us = 2000);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int size() const { return threads_; }
  // CPU of each worker; -1 for worker 0, which is whoever calls run().
  std::vector<int> cpus() const;
  void set_spin_us(int64_t us) { spin_ns_.store(us * 1000, std::memory_order_relaxed); }

  // Runs job(ctx, w, N) on every worker and returns when all are done. Rethrows the first exception of any of
  // them. Callers of different threads take turns; a job may not start another.
  void run(Job job, void* ctx, Join join);

  template <class F>
  void run(Join join, F&& body) {
    using Body = std::remove_reference_t<F>;
    run([](void* ctx, int worker, int workers) { (*static_cast<Body*>(ctx))(worker, workers); }, &body, join);
  }

  // body(worker, lo, hi) over pieces of [0, total) of at most `grain`. Results must not depend on who takes a
  // piece.
  template <class F>
  void parallel_for(int64_t total, int64_t grain, F&& body) {
    std::atomic<int64_t> next{0};
    run(Join::willing, [&](int worker, int) {
      for (int64_t lo; (lo = next.fetch_add(grain, std::memory_order_relaxed)) < total;) {
        body(worker, lo, lo + grain < total ? lo + grain : total);
      }
    });
  }

  // Of the running job's worker `worker` only.
  Scratch& scratch(int worker) { return seats_[worker].scratch; }

  // Pins the calling thread to worker 0's CPU, for a thread that lives to feed this pool. One at a time: while it
  // keeps what this returns, others stay where the scheduler puts them, or two that spin would share a CPU.
  [[nodiscard]] std::unique_lock<std::mutex> pin_caller();

  // Held while a job runs; fork() takes it so that a child never inherits half a job.
  std::mutex& run_mutex() { return run_mutex_; }

 private:
  struct alignas(128) Seat {
    std::atomic<uint32_t> state{0};
    Scratch scratch;
    std::thread thread;
  };

  int pauses() const { return oversubscribed_ ? 4 : Backoff::kOwnCore; }
  void loop(int worker);
  void execute(int worker);
  // The caller is not pinned. Where the scheduler has put it on a worker's CPU, the two would take turns, so
  // that worker moves to the CPU that is free instead. (What it gains has not been measured.) With run_mutex_
  // held.
  void seat_caller();

  const int threads_;
  const bool oversubscribed_;
  std::vector<Cpu> cpus_;  // [0] is the caller's; under run_mutex_ once the workers run
  std::atomic<int64_t> spin_ns_;
  std::unique_ptr<Seat[]> seats_;
  mutable std::mutex run_mutex_;
  std::mutex pinned_;  // held by the caller that is pinned

  alignas(128) EventWord start_;
  Job job_ = nullptr;
  void* ctx_ = nullptr;
  std::atomic<bool> stop_{false};  // a worker that stayed away from the last job may look at it at any time
  alignas(128) std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace coattn
