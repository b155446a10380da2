// Single rows of quantised blocks as numbers of a float type.
#pragma once

#include "block_layout.h"
#include "dispatch.h"
#include "worker_pool.h"

namespace coattn {

class PackedRows {
 public:
  PackedRows(const BlockLayout& layout, Elem elem, WorkerPool& pool)
      : layout_(layout), elem_(elem), pool_(pool), table_(kernels()) {}

  // Key and value of one row of a block, to `k` and `v`.
  void read(int worker, const uint8_t* block, int row, uint8_t* k, uint8_t* v) const {
    const int64_t size = layout_.head_size;
    auto* wide =
        reinterpret_cast<float*>(pool_.scratch(worker).get(sizeof(float) * 2 * static_cast<size_t>(size)));
    table_.read_row(layout_, block, row, wide, wide + size);
    table_.convert(Elem::f32, wide, elem_, k, size);
    table_.convert(Elem::f32, wide + size, elem_, v, size);
  }

 private:
  const BlockLayout layout_;
  const Elem elem_;
  WorkerPool& pool_;
  const Kernels& table_;
};

}  // namespace coattn
