#include "block_layout.h"

#include "errors.h"

namespace coattn {

BlockLayout block_layout(Elem elem, int block, int head_size, bool keys) {
  if (head_size < 8 || head_size > 1024 || head_size % 8 != 0) {
    throw Refusal("Head size " + std::to_string(head_size) + " is not a multiple of 8 between 8 and 1024.",
                  "Pad the heads with zero channels.");
  }
  if (block < 1 || block > 1024) {
    throw Refusal("A block of " + std::to_string(block) + " tokens is outside 1..1024.",
                  "32 is the default.");
  }
  if (keys && elem == Elem::int4) {
    throw Refusal("Blocks of int4 hold values alone.", "Keep keys in int8.");
  }
  BlockLayout b{};
  b.elem = elem;
  b.block = block;
  b.head_size = head_size;
  b.row_bytes = elem_bytes(elem, head_size);
  b.v = keys ? b.row_bytes * block : 0;
  b.k_stride = b.v_stride = b.row_bytes;
  b.scale_row = 2;
  b.scale_group = int64_t{2} * block;
  b.k_scale = b.k_min = b.v_scale = b.v_min = (keys ? 2 : 1) * b.row_bytes * block;
  if (is_quantised(elem)) b.v_groups = elem == Elem::int8 ? 1 : 2;
  if (is_quantised(elem) && !keys) {
    b.v_scale = b.row_bytes;
    b.v_min = b.v_scale + 2 * b.v_groups;
    b.scale_row = b.v_stride = b.row_bytes + 4 * b.v_groups;
    b.scale_group = 2;
    b.bytes = b.v_stride * block;
  } else if (is_quantised(elem)) {
    b.k_min = b.k_scale + 2 * head_size;
    b.v_scale = b.k_min + 2 * head_size;
    b.v_min = b.v_scale + int64_t{2} * block;
    b.bytes = b.v_min + int64_t{2} * block;
  } else {
    b.bytes = b.v_scale;
  }
  b.bytes = (b.bytes + 63) / 64 * 64;
  return b;
}

}  // namespace coattn
