// One (block, KV head) of the arena:
//
//   offset            bytes                       what
//   k                 block rows                  key rows
//   v                 block rows                  value rows
//   k_scale, k_min    2 * head_size each          float16 per channel         (int8)
//   v_scale, v_min    2 * block each              float16 per row             (int8)
//
// The whole is padded to `bytes`, a multiple of 64. Rows follow each other without padding.
//
// int8 follows KIVI (Liu et al. 2024, section 3): keys have outlier channels, so each channel of a block has its
// own scale over the block's tokens; values do not, so each token has its own. A stored code c stands for
// min + scale * c with c in 0..255.
//
// A code's error is at most half a step: scale / 2 = (max - min) / (2 * 255), over the channel's tokens of the
// block for keys and over the token's channels for values. Scales are rounded up and minima down to float16,
// so no code clips.
//
// Measured (head_size 128, block 32, 4,096 normal keys and values, 4 query heads a KV head; relative to bf16,
// 2-norm): keys 0.5%, values 0.6%, attention output 0.7% with flat weights (1,650 effective keys) and 1.2%
// with sharp ones (40 effective keys). With offset and scaled outlier channels the keys' error falls to 0.3%.
// The kernels themselves add at most 0.06% to the output.
//
// A block without keys (`keys` false) is its value rows alone, and these may be int4: codes 0..15 in two
// groups with scales of their own, the lower and the upper half of the channels. An int4 byte j of a row holds
// channel j in its low and channel j + head_size / 2 in its high half, so that unpacking is a mask and a shift
// and never a shuffle. A quantised row of such a block is followed by its own scales and minima, `v_groups` of
// each: single rows are read from anywhere, and each would cost four cache lines more.
//
// Bytes a token and head at head_size 128 and block 32: bf16 512, int8 276 (1.86x less); of values alone bf16
// 256, int8 132, int4 72.
#pragma once

#include <cstdint>

#include "element.h"

namespace coattn {

struct BlockLayout {
  Elem elem;
  int block;
  int head_size;
  int v_groups;  // 0 for float elements
  int64_t row_bytes;
  int64_t k_stride, v_stride;      // bytes from a key row to the next, from a value row to the next
  int64_t scale_row, scale_group;  // from a value row's scale to the next row's, and to its next group's
  int64_t k, v, k_scale, k_min, v_scale, v_min;
  int64_t bytes;
};

// Refuses head sizes that are not a positive multiple of 8 (at most 1024), blocks outside 1..1024 and int4 keys.
BlockLayout block_layout(Elem elem, int block, int head_size, bool keys = true);

}  // namespace coattn
