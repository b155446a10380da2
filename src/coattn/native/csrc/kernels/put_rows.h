// put_rows: single rows of blocks, added to the ends of lists of such blocks that nobody reads meanwhile.
#pragma once

#include <cstdint>

#include "worker_pool.h"

namespace coattn {

struct PutRowsJob {
  int64_t count;          // of lists, none twice
  const int64_t* list;    // [count]
  const int64_t* first;   // [count + 1] where each list's rows begin among all
  const int64_t* source;  // [rows] addresses of blocks
  const int32_t* row;     // [rows] which row of the block
  const int32_t* table;   // [lists, width], the new blocks included
  int64_t width;
  const int32_t* stored;  // [lists] rows of each list so far
  uint8_t* base;          // of the lists' blocks
  int block;
  int head_size;      // of int8 blocks (block_layout.h) their channels; of float blocks 0
  int64_t row_bytes;  // of float blocks: key rows, then value rows
};

void put_rows(const PutRowsJob& job, WorkerPool& pool);

}  // namespace coattn
