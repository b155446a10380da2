// attend: queries over lists of blocks -> (out, lse), optionally the weights.
#pragma once

#include <cstdint>

#include "element.h"
#include "worker_pool.h"

namespace coattn {

// A plain description of one call. Everything it points to is read (or written) until attend() returns.
struct AttendJob {
  int seqs, q_tokens, q_heads, kv_heads, head_size;

  const void* q;  // [seqs, q_tokens, q_heads, head_size], the last dimension contiguous
  Elem q_elem;
  int64_t q_seq, q_token, q_head;  // strides in elements
  float scale;
  float softcap;  // 0: none; else cap * tanh(score / cap)

  // Lists of blocks. Only the last block of a list is partly filled.
  Elem elem;              // of keys and values: not int4
  const int32_t* table;   // [seqs, table_heads, max_blocks]
  const int32_t* tokens;  // [seqs, table_heads]
  int table_heads;        // 1 (all KV heads share a list) or kv_heads
  int64_t max_blocks;
  const int32_t* owners;  // [seqs]: the row of table and tokens of each sequence, or null: its own number
  const uint8_t* base;    // block b of head h lies at base + b * block_stride + h * head_stride
  int64_t block_stride, head_stride, num_blocks;
  int block;

  float* out;      // [seqs, q_tokens, q_heads, head_size]
  float* lse;      // [seqs, q_tokens, q_heads]
  float* weights;  // [seqs, q_tokens, q_heads, max_tokens], zero past the list's end, or null
  int64_t max_tokens;
  int64_t piece;    // tiles after which a list is cut, whatever the others are; 0: by lengths and workers
  bool skip_empty;  // leave out as it is where a list is empty; lse is -inf
};

void attend(const AttendJob& job, WorkerPool& pool);

// The kernel that a call with these types, this many queries per KV head and this head size would use.
const char* attend_kernel_name(Elem elem, Elem q_elem, int group, int head_size);

}  // namespace coattn
