#include "kernels/move_rows.h"

#include <cstring>

namespace coattn {

void move_rows(const MoveRowsJob& job, WorkerPool& pool) {
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
