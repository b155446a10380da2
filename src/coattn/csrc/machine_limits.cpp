#include "machine_limits.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "dispatch.h"
#include "errors.h"
#include "mapping.h"
#include "runtime.h"

namespace coattn {
namespace {

// The process's pool where it has the asked size, else one for the occasion.
class PoolOf {
 public:
  explicit PoolOf(int threads) : shared_(runtime()) {
    if (threads > 0 && threads != shared_->pool.size()) own_ = std::make_unique<WorkerPool>(threads);
  }
  WorkerPool& get() { return own_ ? *own_ : shared_->pool; }

 private:
  std::shared_ptr<Runtime> shared_;
  std::unique_ptr<WorkerPool> own_;
};

template <class Body>
double best_gbps(WorkerPool& pool, int64_t bytes, int repeats, Body&& body) {
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    const int64_t start = now_ns();
    pool.run(Join::all, body);
    best = std::max(best,
                    static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(now_ns() - start, 1)));
  }
  return best;
}

void check(int64_t bytes, int repeats) {
  if (bytes < 4096 || repeats < 1) {
    throw Refusal("A bandwidth measurement needs at least 4096 bytes and one repeat.",
                  "1 GiB and 5 are usual.");
  }
}

}  // namespace

double stream_read_gbps(int threads, int64_t bytes, int repeats) {
  check(bytes, repeats);
  PoolOf pool(threads);
  const Mapping memory(static_cast<size_t>(bytes), pool.get());
  const Kernels& table = kernels();
  return best_gbps(pool.get(), bytes, repeats, [&](int worker, int workers) {
    const int64_t lo = bytes * worker / workers / 64 * 64, hi = bytes * (worker + 1) / workers / 64 * 64;
    table.read(memory.data() + lo, hi - lo, nullptr);
  });
}

double random_gather_gbps(int threads, int64_t block_bytes, int64_t bytes, int repeats) {
  check(bytes, repeats);
  if (block_bytes < 64 || block_bytes % 64 != 0 || block_bytes > bytes) {
    throw Refusal("A block of " + std::to_string(block_bytes) + " bytes cannot be gathered.",
                  "Use a multiple of 64 that is no larger than the memory.");
  }
  PoolOf pool(threads);
  const Mapping memory(static_cast<size_t>(bytes), pool.get());
  std::vector<int64_t> order(static_cast<size_t>(bytes / block_bytes));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  const Kernels& table = kernels();
  const int64_t n = static_cast<int64_t>(order.size());
  return best_gbps(pool.get(), n * block_bytes, repeats, [&](int worker, int workers) {
    const int64_t lo = n * worker / workers, hi = n * (worker + 1) / workers;
    for (int64_t i = lo; i < hi; ++i) {
      const uint8_t* next = i + 1 < hi ? memory.data() + order[i + 1] * block_bytes : nullptr;
      table.read(memory.data() + order[i] * block_bytes, block_bytes, next);
    }
  });
}

std::vector<int64_t> empty_job_latency(int threads, int n) {
  return busy_job_latency(threads, n, 0);
}

std::vector<int64_t> busy_job_latency(int threads, int n, double us) {
  PoolOf pool(threads);
  std::vector<int64_t> ns(static_cast<size_t>(std::max(n, 0)));
  const int64_t busy = static_cast<int64_t>(us * 1000);
  for (int64_t& each : ns) {
    const int64_t start = now_ns();
    pool.get().run(Join::all, [busy](int, int) {
      if (busy == 0) return;
      const int64_t end = now_ns() + busy;
      while (now_ns() < end) cpu_pause();
    });
    each = now_ns() - start;
  }
  return ns;
}

}  // namespace coattn
