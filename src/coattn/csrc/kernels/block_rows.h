// Moving rows [tokens, kv_heads, head_size] into arena blocks and back, converting the element type on the
// way.
#pragma once

#include <cstdint>

#include "element.h"
#include "worker_pool.h"

namespace coattn {

struct BlockRowsJob {
  void* k;  // [tokens, kv_heads, head_size] of row_elem, strides in elements, the last dimension contiguous
  void* v;
  Elem row_elem;
  int64_t k_token, k_head, v_token, v_head;
  int64_t tokens;
  int kv_heads, head_size;
  Elem elem;  // of the blocks
  uint8_t* base;
  int64_t block_stride, head_stride, num_blocks;
  int block;
  // write_rows: token i goes to row slots[i] % block of block slots[i] / block.
  const int64_t* slots;
  // write_blocks, read_blocks: tokens fill blocks[0], blocks[1], ... from their first row on.
  const int32_t* blocks;
  int64_t block_count;
};

// Rows anywhere, float elements only: a quantised key's scale belongs to its whole block.
void write_rows(const BlockRowsJob& job, WorkerPool& pool);

// Whole blocks of any element type (int8 and int4 are quantised here). The last block may be partly filled;
// its other rows stay as they were.
void write_blocks(const BlockRowsJob& job, WorkerPool& pool);

// The inverse: blocks of any element type to rows of a float type (int8 and int4 are dequantised).
void read_blocks(const BlockRowsJob& job, WorkerPool& pool);

}  // namespace coattn
