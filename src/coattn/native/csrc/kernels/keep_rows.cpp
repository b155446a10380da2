#include "kernels/keep_rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "errors.h"
#include "kernels/packed_lists.h"

namespace coattn {
namespace {

void check_width(int64_t stored, int64_t more, const KeepRowsJob& job) {
  if ((stored + more + job.block - 1) / job.block > job.width) {
    throw Refusal("A list of " + std::to_string(stored) + " entries is full.",
                  "Say how long sequences get when the store is opened.");
  }
}

// Where entry number `place` of a list lies, and what it weighs.
void note(const KeepRowsJob& job, int64_t i, int r, int64_t id, int64_t place) {
  const int64_t to = id * job.block + place % job.block;
  job.position[to] = job.first[i] + r;
  job.weights[to] = job.weight[i * job.block + r];
}

void keep_plain(const KeepRowsJob& job, int64_t i) {
  const size_t bytes = static_cast<size_t>(job.row_bytes);
  const int64_t half = job.block * job.row_bytes;
  int32_t* row = job.table + job.list[i] * job.width;
  int32_t& stored = job.stored[job.list[i]];
  for (int r = 0; r < job.block; ++r) {
    if (!job.kept[i * job.block + r]) continue;
    const int64_t at = stored % job.block, number = stored / job.block;
    check_width(stored, 1, job);
    if (at == 0) {
      row[number] = job.spare[i];
      job.used[i] = 1;
    }
    uint8_t* to = job.base + row[number] * 2 * half + at * job.row_bytes;
    const auto* from = reinterpret_cast<const uint8_t*>(job.source[i]);
    std::memcpy(to, from + r * job.row_bytes, bytes);
    std::memcpy(to + half, from + half + r * job.row_bytes, bytes);
    note(job, i, r, row[number], stored);
    ++stored;
  }
}

void keep_packed(const KeepRowsJob& job, int64_t i, const PackedLists& lists, const PackedLists::Rows& rows) {
  int32_t* row = job.table + job.list[i] * job.width;
  int32_t& stored = job.stored[job.list[i]];
  const int64_t number = stored / job.block;
  const int held = stored % job.block;
  job.moved[i] = -1;
  int n = 0;
  for (int r = 0; r < job.block; ++r) {
    if (job.kept[i * job.block + r]) {
      lists.read(reinterpret_cast<const uint8_t*>(job.source[i]), r, rows, held + n++);
    }
  }
  if (n == 0) return;
  check_width(stored, n, job);
  const int fill = held ? std::min(n, job.block - held) : 0;
  int64_t last = held ? row[number] : -1;
  if (held) {
    uint8_t* block = lists.at(last);
    if (lists.extend(block, held, fill, rows, lists.at(job.other[i])) != block) {
      const int64_t from = last * job.block, to = job.other[i] * int64_t{job.block};
      std::copy_n(job.position + from, held, job.position + to);
      std::copy_n(job.weights + from, held, job.weights + to);
      last = job.other[i];
      job.moved[i] = static_cast<int32_t>(number);
    }
  }
  if (n > fill) {
    const int64_t column = number + (held ? 1 : 0);
    const uint8_t* before[PackedLists::kForesee];
    int count = 0;
    for (; count < PackedLists::kForesee && count < column; ++count) {
      const int64_t at = column - 1 - count;
      before[count] = lists.at(held && at == number ? last : row[at]);
    }
    lists.begin(lists.at(job.spare[i]), held + fill, n - fill, rows, before, count);
    row[column] = job.spare[i];
    job.used[i] = 1;
  }
  for (int r = 0, at = 0; r < job.block; ++r) {
    if (!job.kept[i * job.block + r]) continue;
    note(job, i, r, at < fill ? last : job.spare[i], stored + at);
    ++at;
  }
  stored += n;
}

}  // namespace

void keep_rows(const KeepRowsJob& job, WorkerPool& pool) {
  const PackedLists lists(job.base, job.block, job.head_size ? job.head_size : 8);
  pool.parallel_for(job.count, 4, [&](int worker, int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      job.used[i] = 0;
      if (job.head_size) {
        keep_packed(job, i, lists, lists.rows(pool, worker));
      } else {
        keep_plain(job, i);
      }
    }
  });
}

}  // namespace coattn
