#include "kernels/packed_lists.h"

#include <cstring>

namespace coattn {

PackedLists::Rows PackedLists::rows(WorkerPool& pool, int worker) const {
  const int64_t size = layout_.head_size, half = 2 * layout_.block * size;
  auto* k = reinterpret_cast<float*>(
      pool.scratch(worker).get(sizeof(float) * static_cast<size_t>(2 * (half + size))));
  return {k, k + half, k + 2 * half, k + 2 * half + size};
}

uint8_t* PackedLists::extend(uint8_t* block, int held, int n, const Rows& rows, uint8_t* other) const {
  const int64_t size = layout_.head_size;
  const float *k = rows.k + held * size, *v = rows.v + held * size;
  table_.rows.range(k, n, layout_.head_size, rows.low, rows.high);
  if (!table_.rows.widen(layout_, rows.low, rows.high, true, block)) {
    table_.rows.keys(layout_, k, held, n, block);
    table_.rows.values(layout_, v, held, n, block);
    return block;
  }
  for (int r = 0; r < held; ++r) table_.read_row(layout_, block, r, rows.k + r * size, nullptr);
  if (other != block) std::memcpy(other, block, static_cast<size_t>(layout_.bytes));
  table_.rows.widen(layout_, rows.low, rows.high, false, other);
  table_.rows.keys(layout_, rows.k, 0, held + n, other);
  table_.rows.values(layout_, v, held, n, other);
  return other;
}

void PackedLists::begin(uint8_t* block, int64_t first, int n, const Rows& rows, const uint8_t* const* before,
                        int count) const {
  const float *k = rows.k + first * layout_.head_size, *v = rows.v + first * layout_.head_size;
  if (n == layout_.block || count == 0) {
    table_.quantise(layout_, k, v, n, block);
    return;
  }
  const size_t scales = static_cast<size_t>(layout_.v_scale - layout_.k_scale);
  std::memcpy(block + layout_.k_scale, before[0] + layout_.k_scale, scales);
  for (int i = 1; i < count; ++i) {
    table_.rows.held(layout_, before[i], rows.low, rows.high);
    table_.rows.widen(layout_, rows.low, rows.high, false, block);
  }
  table_.rows.range(k, n, layout_.head_size, rows.low, rows.high);
  table_.rows.widen(layout_, rows.low, rows.high, false, block);
  table_.rows.keys(layout_, k, 0, n, block);
  table_.rows.values(layout_, v, 0, n, block);
}

}  // namespace coattn
