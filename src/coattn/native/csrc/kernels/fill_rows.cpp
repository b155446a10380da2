#include "kernels/fill_rows.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "errors.h"
#include "kernels/put_rows.h"

namespace coattn {
namespace {

// Where rows come from, of one piece.
struct Piece {
  std::vector<int64_t> source;
  std::vector<int32_t> row;
};

void fill_piece(const FillRowsJob& job, WorkerPool& pool, int64_t begin, int64_t end, Piece& piece) {
  const int64_t count = end - begin, before = job.stored[job.list];
  const int32_t* ids = job.table + job.list * job.width;
  piece.source.resize(static_cast<size_t>(count));
  piece.row.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int32_t position = job.position[begin + i];
    const int64_t to = int64_t{ids[(before + i) / job.block]} * job.block + (before + i) % job.block;
    job.positions[to] = position;
    job.weights[to] = job.weight[begin + i];
    const uint8_t* block = job.source + job.id[position / job.block] * job.block_stride;
    piece.source[static_cast<size_t>(i)] = reinterpret_cast<int64_t>(block);
    piece.row[static_cast<size_t>(i)] = position % job.block;
  }
  const int64_t first[] = {0, count};
  put_rows({1, &job.list, first, piece.source.data(), piece.row.data(), job.table, job.width, job.stored,
            job.base, job.block, job.head_size, job.row_bytes},
           pool);
  job.stored[job.list] = static_cast<int32_t>(before + count);
}

bool stopped(const FillRowsJob& job) {
  return job.stop && __atomic_load_n(job.stop, __ATOMIC_ACQUIRE);
}

}  // namespace

int64_t fill_rows(const FillRowsJob& job, WorkerPool& pool) {
  const int64_t before = job.stored[job.list], after = before + job.count;
  const int64_t have = (before + job.block - 1) / job.block, need = (after + job.block - 1) / job.block;
  if (need > job.width) {
    throw Refusal("A list of " + std::to_string(before) + " entries is full.",
                  "Say how long sequences get when the store is opened.");
  }
  int32_t* ids = job.table + job.list * job.width;
  for (int64_t i = have; i < need; ++i) ids[i] = job.fresh[i - have];
  Piece piece;
  for (int64_t at = 0; at < job.count; at += job.piece) {
    if (stopped(job)) return at;
    const auto begun = std::chrono::steady_clock::now();
    fill_piece(job, pool, at, std::min(job.count, at + job.piece), piece);
    const auto took = std::chrono::steady_clock::now() - begun;
    if (job.rest > 0 && !stopped(job)) std::this_thread::sleep_for(took * job.rest);
  }
  return job.count;
}

}  // namespace coattn
