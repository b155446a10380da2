#include "machine_limits.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "arena.h"
#include "dispatch.h"
#include "errors.h"
#include "kernels/split.h"
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

// Pieces are asked for this many bytes before they are read.
constexpr int64_t kAheadBytes = 32768;

// Reads at(0) .. at(n - 1) in this order, in as many shares as attend would make.
template <class At>
void gather(WorkerPool& pool, int64_t n, int64_t bytes, At&& at) {
  const Kernels& table = kernels();
  const int64_t ahead = std::clamp<int64_t>((kAheadBytes + bytes - 1) / bytes, 1, 8);
  std::vector<int64_t> cut{0};
  while (cut.back() < n) cut.push_back(cut.back() + SplitPlan::share(n - cut.back(), pool.size(), 4));
  pool.parallel_for(static_cast<int64_t>(cut.size()) - 1, 1, [&](int, int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      const int64_t hi = cut[c + 1];
      for (int64_t i = cut[c]; i < hi; ++i) {
        table.read(at(i), bytes, i + ahead < hi ? at(i + ahead) : nullptr);
      }
    }
  });
}

template <class Body>
double best_gbps(int64_t bytes, int repeats, Body&& body) {
  double best = 0;
  for (int r = 0; r < repeats; ++r) {
    const int64_t start = now_ns();
    body();
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
  Arena memory(bytes, false);
  memory.grow(bytes, pool.get());
  const Kernels& table = kernels();
  return best_gbps(bytes, repeats, [&] {
    pool.get().run(Join::all, [&](int worker, int workers) {
      const int64_t lo = bytes * worker / workers / 64 * 64, hi = bytes * (worker + 1) / workers / 64 * 64;
      table.read(memory.base() + lo, hi - lo, nullptr);
    });
  });
}

double random_gather_gbps(int threads, int64_t block_bytes, int64_t bytes, int repeats) {
  check(bytes, repeats);
  if (block_bytes < 64 || block_bytes % 64 != 0 || block_bytes > bytes) {
    throw Refusal("A block of " + std::to_string(block_bytes) + " bytes cannot be gathered.",
                  "Use a multiple of 64 that is no larger than the memory.");
  }
  PoolOf pool(threads);
  Arena memory(bytes, false);
  memory.grow(bytes, pool.get());
  std::vector<int64_t> order(static_cast<size_t>(bytes / block_bytes));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  const int64_t n = static_cast<int64_t>(order.size());
  return best_gbps(n * block_bytes, repeats, [&] {
    gather(pool.get(), n, block_bytes, [&](int64_t i) { return memory.base() + order[i] * block_bytes; });
  });
}

double gather_gbps(int threads, const GatherPieces& p, int repeats) {
  const int64_t n = p.lists * p.heads * p.blocks;
  if (p.bytes < 64 || p.bytes % 64 != 0 || n < 1 || repeats < 1) {
    throw Refusal("There is nothing to gather in this table.",
                  "Give lists of blocks and at least one repeat.");
  }
  for (int64_t i = 0; i < p.lists * p.blocks; ++i) {
    if (p.table[i] < 0 || p.table[i] >= p.num_blocks) {
      throw Refusal(
          "Block " + std::to_string(p.table[i]) + " is not one of " + std::to_string(p.num_blocks) + ".",
          "Every entry of the table must be a block.");
    }
  }
  PoolOf pool(threads);
  const auto at = [&](int64_t i) {
    const int64_t item = i / p.blocks, list = item / p.heads, head = item % p.heads;
    return p.base + p.table[list * p.blocks + i % p.blocks] * p.block_stride + head * p.head_stride;
  };
  return best_gbps(n * p.bytes, repeats, [&] { gather(pool.get(), n, p.bytes, at); });
}

std::vector<int64_t> job_latency(int threads, int n, double us) {
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

std::vector<int64_t> spin_gaps(int threads, double seconds, double least_us) {
  PoolOf pool(threads);
  const int64_t end = now_ns() + static_cast<int64_t>(seconds * 1e9);
  const int64_t least = static_cast<int64_t>(least_us * 1000);
  std::vector<std::vector<int64_t>> found(static_cast<size_t>(pool.get().size()));
  pool.get().run(Join::all, [&](int worker, int) {
    for (int64_t before = now_ns(), now; before < end; before = now) {
      cpu_pause();
      now = now_ns();
      if (now - before >= least) found[static_cast<size_t>(worker)].push_back(now - before);
    }
  });
  std::vector<int64_t> gaps;
  for (const auto& each : found) gaps.insert(gaps.end(), each.begin(), each.end());
  return gaps;
}

}  // namespace coattn
