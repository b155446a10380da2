// A submitted job as Python holds it.
#pragma once

#include "runtime.h"

namespace coattn {

// Keeps the runtime it was submitted to, which set_threads() may meanwhile have replaced.
class Ticket {
 public:
  Ticket(std::shared_ptr<Runtime> owner, uint64_t id) : runtime_(std::move(owner)), id_(id) {}
  bool wait(int64_t timeout_us) { return runtime_->queue.wait(id_, timeout_us); }

 private:
  std::shared_ptr<Runtime> runtime_;
  uint64_t id_;
};

// Job is copied; what it points to stays the caller's.
template <class Job>
Ticket submit(const Job& job, void (*run)(const Job&, WorkerPool&)) {
  std::shared_ptr<Runtime> r = runtime();
  const uint64_t id = r->queue.submit([job, run](WorkerPool& pool) { run(job, pool); });
  return {std::move(r), id};
}

}  // namespace coattn
