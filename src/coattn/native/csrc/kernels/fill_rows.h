// fill_rows: chosen rows of one sequence's blocks, added to the end of one list that nobody reads meanwhile.
#pragma once

#include <cstdint>

#include "worker_pool.h"

namespace coattn {

struct FillRowsJob {
  int64_t count;            // of rows
  const int32_t* position;  // [count] of each in its sequence, in order
  const float* weight;      // [count]
  const int32_t* id;        // the sequence's blocks
  const uint8_t* source;    // of its KV head in block 0
  int64_t block_stride;
  int64_t list;
  const int32_t* fresh;  // blocks that nobody owns, as many as the list needs
  int32_t* table;        // [lists, width]
  int64_t width;
  int32_t* stored;  // [lists] rows of each list
  uint8_t* base;    // of the lists' blocks
  int block;
  int head_size;  // as in PutRowsJob
  int64_t row_bytes;
  int32_t* positions;   // [blocks, block]
  float* weights;       // [blocks, block]
  int64_t piece;        // rows that are written at a time, whole blocks
  double rest;          // how long it sleeps after a piece, by the time that the piece took
  const int32_t* stop;  // null, or a word that others set: it ends after the piece that it is at
};

// Returns how many rows were written, the first ones.
int64_t fill_rows(const FillRowsJob& job, WorkerPool& pool);

}  // namespace coattn
