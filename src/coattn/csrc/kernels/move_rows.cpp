#include "kernels/move_rows.h"

#include <cstring>

#include "kernels/packed_rows.h"

namespace coattn {

namespace {

void move_packed(const MoveRowsJob& job, WorkerPool& pool) {
  const BlockLayout layout = block_layout(Elem::int8, job.block, job.head_size);
  const PackedRows packed(layout, job.to_elem, pool);
  pool.parallel_for(job.count, 64, [&](int worker, int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      auto* to = reinterpret_cast<uint8_t*>(job.to[i]);
      packed.read(worker, reinterpret_cast<const uint8_t*>(job.from[i]), job.rows[i], to, to + job.to_value);
    }
  });
}

}  // namespace

void move_rows(const MoveRowsJob& job, WorkerPool& pool) {
  if (job.rows) {
    move_packed(job, pool);
    return;
  }
  const size_t bytes = static_cast<size_t>(job.row_bytes);
  pool.parallel_for(job.count, 64, [&](int, int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      const auto* from = reinterpret_cast<const uint8_t*>(job.from[i]);
      auto* to = reinterpret_cast<uint8_t*>(job.to[i]);
      std::memcpy(to, from, bytes);
      std::memcpy(to + job.to_value, from + job.from_value, bytes);
    }
  });
}

}  // namespace coattn
