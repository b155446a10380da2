#include "kernels/put_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/packed_lists.h"

namespace coattn {
namespace {

// Rows of one block of a list.
struct Piece {
  const int32_t* ids;  // the list's row of the table
  int64_t column, first;
  int held, n;
};

// Past the caches: lists are larger than these, and whoever attends meanwhile needs them and the memory's
// bandwidth, of which an ordinary store takes twice as much.
void copy_past_caches(uint8_t* to, const uint8_t* from, int64_t bytes) {
#if defined(__x86_64__)
  if (bytes % 16 == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (int64_t i = 0; i < bytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    }
    return;
  }
#endif
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

void end_copies() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Rows that a worker takes at a time: a list may be the only one.
constexpr int64_t kRows = 256;

void put_plain(const PutRowsJob& job, WorkerPool& pool) {
  const int64_t half = job.block * job.row_bytes;
  pool.parallel_for(job.first[job.count], kRows, [&](int, int64_t lo, int64_t hi) {
    int64_t i = std::upper_bound(job.first, job.first + job.count + 1, lo) - job.first - 1;
    for (int64_t at = lo; at < hi; ++i) {
      const int32_t* ids = job.table + job.list[i] * job.width;
      int64_t stored = job.stored[job.list[i]] + at - job.first[i];
      for (const int64_t end = std::min(hi, job.first[i + 1]); at < end; ++at, ++stored) {
        const auto* from = reinterpret_cast<const uint8_t*>(job.source[at]) + job.row[at] * job.row_bytes;
        uint8_t* to = job.base + ids[stored / job.block] * 2 * half + stored % job.block * job.row_bytes;
        copy_past_caches(to, from, job.row_bytes);
        copy_past_caches(to + half, from + half, job.row_bytes);
      }
    }
    end_copies();
  });
}

}  // namespace

void put_rows(const PutRowsJob& job, WorkerPool& pool) {
  if (job.head_size == 0) return put_plain(job, pool);
  const PackedLists lists(job.base, job.block, job.head_size);
  // what is full or there already needs no other block; a block that is begun comes after those before it
  std::vector<Piece> now, after;
  for (int64_t i = 0; i < job.count; ++i) {
    const int32_t* ids = job.table + job.list[i] * job.width;
    int64_t stored = job.stored[job.list[i]];
    for (int64_t at = job.first[i]; at < job.first[i + 1];) {
      const int held = static_cast<int>(stored % job.block);
      const int n = static_cast<int>(std::min<int64_t>(job.block - held, job.first[i + 1] - at));
      (held || n == job.block ? now : after).push_back({ids, stored / job.block, at, held, n});
      at += n;
      stored += n;
    }
  }
  const auto write = [&](const std::vector<Piece>& pieces) {
    pool.parallel_for(static_cast<int64_t>(pieces.size()), 4, [&](int worker, int64_t lo, int64_t hi) {
      const PackedLists::Rows rows = lists.rows(pool, worker);
      for (int64_t i = lo; i < hi; ++i) {
        const Piece& p = pieces[static_cast<size_t>(i)];
        uint8_t* block = lists.at(p.ids[p.column]);
        for (int r = 0; r < p.n; ++r) {
          lists.read(reinterpret_cast<const uint8_t*>(job.source[p.first + r]), job.row[p.first + r], rows,
                     p.held + r);
        }
        if (p.held) {
          lists.extend(block, p.held, p.n, rows, block);
          continue;
        }
        const uint8_t* before[PackedLists::kForesee];
        const int count = static_cast<int>(std::min<int64_t>(PackedLists::kForesee, p.column));
        for (int b = 0; b < count; ++b) before[b] = lists.at(p.ids[p.column - 1 - b]);
        lists.begin(block, 0, p.n, rows, before, count);
      }
    });
  };
  write(now);
  write(after);
}

}  // namespace coattn
