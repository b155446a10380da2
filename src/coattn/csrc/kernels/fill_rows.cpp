#include "kernels/fill_rows.h"

#include <string>
#include <vector>

#include "errors.h"
#include "kernels/put_rows.h"

namespace coattn {

void fill_rows(const FillRowsJob& job, WorkerPool& pool) {
  const int64_t before = job.stored[job.list], after = before + job.count;
  const int64_t have = (before + job.block - 1) / job.block, need = (after + job.block - 1) / job.block;
  if (need > job.width) {
    throw Refusal("A list of " + std::to_string(before) + " entries is full.",
                  "Say how long sequences get when the store is opened.");
  }
  int32_t* row = job.table + job.list * job.width;
  for (int64_t i = have; i < need; ++i) row[i] = job.fresh[i - have];
  std::vector<int64_t> source(static_cast<size_t>(job.count));
  std::vector<int32_t> from(source.size());
  for (int64_t i = 0; i < job.count; ++i) {
    const int32_t position = job.position[i];
    const int64_t to = int64_t{row[(before + i) / job.block]} * job.block + (before + i) % job.block;
    job.positions[to] = position;
    job.weights[to] = job.weight[i];
    const uint8_t* block = job.source + job.id[position / job.block] * job.block_stride;
    source[static_cast<size_t>(i)] = reinterpret_cast<int64_t>(block);
    from[static_cast<size_t>(i)] = position % job.block;
  }
  const int64_t first[] = {0, job.count};
  put_rows({1, &job.list, first, source.data(), from.data(), job.table, job.width, job.stored, job.base,
            job.block, job.head_size, job.row_bytes},
           pool);
  job.stored[job.list] = static_cast<int32_t>(after);
}

}  // namespace coattn
