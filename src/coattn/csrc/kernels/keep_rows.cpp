#include "kernels/keep_rows.h"

#include <cstring>

#include "errors.h"
#include "kernels/packed_rows.h"

namespace coattn {

void keep_rows(const KeepRowsJob& job, WorkerPool& pool) {
  const size_t bytes = static_cast<size_t>(job.row_bytes);
  const int64_t half = job.block * job.row_bytes;
  const int head_size = job.packed ? job.head_size : 8;
  const PackedRows packed(block_layout(Elem::int8, job.block, head_size), job.to_elem, pool);
  pool.parallel_for(job.count, 4, [&](int worker, int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      int32_t* row = job.table + job.list[i] * job.width;
      int32_t& stored = job.stored[job.list[i]];
      job.used[i] = 0;
      for (int r = 0; r < job.block; ++r) {
        if (!job.kept[i * job.block + r]) continue;
        const int64_t at = stored % job.block, number = stored / job.block;
        if (number >= job.width) {
          throw Refusal("A list of " + std::to_string(stored) + " entries is full.",
                        "Say how long sequences get when the store is opened.");
        }
        if (at == 0) {
          row[number] = job.spare[i];
          job.used[i] = 1;
        }
        const int64_t id = row[number];
        uint8_t* to = job.base + id * 2 * half + at * job.row_bytes;
        const auto* from = reinterpret_cast<const uint8_t*>(job.source[i]);
        if (job.packed) {
          packed.read(worker, from, r, to, to + half);
        } else {
          std::memcpy(to, from + r * job.row_bytes, bytes);
          std::memcpy(to + half, from + half + r * job.row_bytes, bytes);
        }
        job.position[id * job.block + at] = job.first[i] + r;
        job.weights[id * job.block + at] = job.weight[i * job.block + r];
        ++stored;
      }
    }
  });
}

}  // namespace coattn
