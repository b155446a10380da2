// score_digest: how high a block's keys could score, from its digest alone.
#pragma once

#include <cstdint>

#include "element.h"
#include "worker_pool.h"

namespace coattn {

// A digest row is [min | max] of the block's keys (two_sided) or their mean, of one KV head.
struct ScoreDigestJob {
  int seqs, q_heads, kv_heads, head_size;
  const void* q;  // [seqs, q_heads, head_size]
  Elem q_elem;
  int64_t q_seq, q_head;  // strides in elements
  Elem elem;              // of the digests; a float type
  bool two_sided;         // score = sum of max(q * min, q * max); else q . mean
  const uint8_t* base;  // the digest of block b and head h lies at base + b * block_stride + h * head_stride
  int64_t block_stride, head_stride, num_blocks;
  const int32_t* table;  // [seqs, table_heads, max_blocks]
  const int32_t* count;  // [seqs, table_heads] blocks in each list
  int table_heads;
  int64_t max_blocks;
  float scale;
  float* out;  // [seqs, q_heads, max_blocks], -inf past the list's end
};

void score_digest(const ScoreDigestJob& job, WorkerPool& pool);

}  // namespace coattn
