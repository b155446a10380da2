// Rows at the ends of lists of int8 blocks (block_layout.h), each block of one KV head.
//
// A block has one scale per key channel, so a row that is added to a partly filled block may lie outside of
// it. Nothing is clipped then: the block is written anew with wider scales, in another place where somebody
// may be reading it. Its keys are rounded once more in the channels that became wider; its values are copied.
// So that this is rare, a block that is begun, and not filled at once, also holds what the blocks before it
// hold.
#pragma once

#include <cstdint>

#include "block_layout.h"
#include "dispatch.h"
#include "worker_pool.h"

namespace coattn {

class PackedLists {
 public:
  static constexpr int kForesee = 8;  // blocks before a new one whose ranges it holds as well

  // Rows as floats: keys and values [2 * block][head_size], then a range.
  struct Rows {
    float *k, *v, *low, *high;
  };

  PackedLists(uint8_t* base, int block, int head_size)
      : layout_(block_layout(Elem::int8, block, head_size)), base_(base), table_(kernels()) {}

  uint8_t* at(int64_t id) const { return base_ + id * layout_.bytes; }

  Rows rows(WorkerPool& pool, int worker) const;

  // One row of a block becomes row `to`.
  void read(const uint8_t* source, int row, const Rows& rows, int64_t to) const {
    const int64_t size = layout_.head_size;
    table_.read_row(layout_, source, row, rows.k + to * size, rows.v + to * size);
  }

  // Rows held..held + n to a block with `held` rows. Where its scales do not hold them, all are written to
  // `other`, which may be the block itself. The block that has them.
  uint8_t* extend(uint8_t* block, int held, int n, const Rows& rows, uint8_t* other) const;

  // Rows first..first + n as the only ones of a block; before: the `count` blocks before it, the last one
  // first.
  void begin(uint8_t* block, int64_t first, int n, const Rows& rows, const uint8_t* const* before,
             int count) const;

 private:
  const BlockLayout layout_;
  uint8_t* const base_;
  const Kernels& table_;
};

}  // namespace coattn
