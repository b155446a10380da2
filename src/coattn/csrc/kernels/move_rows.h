// move_rows: single entries (a key row and a value row) from anywhere to anywhere, by address.
#pragma once

#include <cstdint>

#include "worker_pool.h"

namespace coattn {

struct MoveRowsJob {
  const int64_t* from;  // [count] addresses of key rows
  const int64_t* to;    // [count] addresses they go to; no two overlap
  int64_t count;
  int64_t row_bytes;
  int64_t from_value, to_value;  // bytes from a key row to its value row
};

void move_rows(const MoveRowsJob& job, WorkerPool& pool);

}  // namespace coattn
