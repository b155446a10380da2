// keep_rows: the chosen rows of one block for each of many lists, added to the ends of the lists.
#pragma once

#include <cstdint>

#include "worker_pool.h"

namespace coattn {

// A list is a row of `table`: blocks of one KV head, all full but the last. Several entries of one job never
// name the same list. Rows that are there already may be read meanwhile: they stay as they are, and so does
// the table's row of them, which the caller changes where a block was moved.
struct KeepRowsJob {
  int64_t count;  // of blocks, each for one list
  int block;      // rows of a block, here and in the lists
  int64_t row_bytes;
  const uint8_t* kept;    // [count, block] 0 or 1
  const float* weight;    // [count, block]
  const int64_t* source;  // [count] addresses: key rows, then value rows
  const int32_t* first;   // [count] position of each block's first row
  const int64_t* list;    // [count]
  const int32_t* spare;   // [count] a block that nobody owns, for a list whose last one becomes full
  uint8_t* used;          // [count] whether it was taken
  int32_t* table;         // [lists, width]
  int64_t width;
  int32_t* stored;    // [lists] rows of each list
  uint8_t* base;      // of the lists' blocks: key rows, then value rows
  int32_t* position;  // [blocks, block]
  float* weights;     // [blocks, block]
  // Of float blocks 0; of int8 ones (block_layout.h), here and in the lists, their channels, and then:
  int head_size;
  const int32_t* other;  // [count] another block that nobody owns
  int32_t* moved;  // [count] -1, or the column of `table` whose rows are in `other` now, and more of them
};

void keep_rows(const KeepRowsJob& job, WorkerPool& pool);

}  // namespace coattn
