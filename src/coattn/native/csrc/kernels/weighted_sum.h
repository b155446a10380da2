// weighted_sum: given weights over chosen entries -> the sum of their values (HCAttention's CPU half).
#pragma once

#include "kernels/entries.h"
#include "worker_pool.h"

namespace coattn {

struct WeightedSumJob {
  EntrySource source;
  int seqs, q_heads;
  const int32_t* index;  // [seqs, kv_heads, max_entries] positions in the sequence
  const int32_t* count;  // [seqs, kv_heads]
  int64_t max_entries;
  const float* weights;  // [seqs, q_heads, max_entries]
  float* out;            // [seqs, q_heads, head_size]
};

void weighted_sum(const WeightedSumJob& job, WorkerPool& pool);

}  // namespace coattn
