// compact: chosen entries, gathered into contiguous runs of float rows (HGCA's contextual cache).
#pragma once

#include "kernels/entries.h"
#include "worker_pool.h"

namespace coattn {

struct CompactJob {
  EntrySource source;
  int seqs;
  const int32_t* index;  // [seqs, kv_heads, max_entries]
  const int32_t* count;  // [seqs, kv_heads]
  int64_t max_entries;
  Elem out_elem;   // a float type; quantised entries are dequantised
  uint8_t* k_out;  // [seqs, kv_heads, max_entries, head_size], strides in bytes, rows contiguous
  uint8_t* v_out;
  int64_t k_seq, k_head, k_row, v_seq, v_head, v_row;
};

void compact(const CompactJob& job, WorkerPool& pool);

}  // namespace coattn
