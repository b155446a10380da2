// keep_rows: the chosen rows of one block for each of many lists, added to the ends of the lists.
#pragma once

#include <cstdint>

#include "element.h"
#include "worker_pool.h"

namespace coattn {

// A list is a row of `table`: blocks of one KV head, all full but the last. Several entries of one job never
// name the same list.
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
  bool packed;        // whether sources are int8 blocks, whose rows are written as `to_elem`
  int head_size;
  Elem to_elem;
};

void keep_rows(const KeepRowsJob& job, WorkerPool& pool);

}  // namespace coattn
