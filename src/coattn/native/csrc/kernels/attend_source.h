// Where an attend job's tiles are: "tile j of item i".
#pragma once

#include <algorithm>
#include <string>

#include "block_layout.h"
#include "errors.h"
#include "kernels/attend.h"
#include "kernels/attend_kernel.h"

namespace coattn {

// An item is one (sequence, KV head).
class AttendSource {
  // Bytes between asking and reading. Measured with 16 threads on Emerald Rapids (virtual), head 128, best ns
  // a block: bf16 with 32, 64 and 128 KiB 1,800 / 2,155 / 2,628 (4 queries) and 1,881 / 2,238 / 2,677 (8);
  // int8 with 16, 32 and 64 KiB 1,609 / 1,627 / 1,521 (8).
  static constexpr int64_t kAhead = 32768, kAheadQuantised = 65536;
  // Quantised: no more than this part of a chunk, for it starts with as much in one burst. Measured with two
  // threads and jobs of 64 int8 blocks in chunks of 16 and fewer: best 43 us with 16 KiB, 46 with 32, 57 with
  // 64.
  static constexpr int64_t kPart = 8, kLeast = 16384;

 public:
  explicit AttendSource(const AttendJob& job)
      : job_(job), layout_(block_layout(job.elem, job.block, job.head_size)) {
    // Two tiles of keys and values (this one and the one being fetched) should fit the L1 cache.
    rows_ = layout_.row_bytes >= 256 ? 32 : kTileRows;
    per_block_ = (job.block + rows_ - 1) / rows_;
    tile_bytes_ = 2 * std::min(rows_, job.block) * layout_.row_bytes;
  }

  int64_t tokens(int64_t item) const { return job_.tokens[list(item)]; }

  // Refuses lists that do not fit their table.
  int64_t tiles(int64_t item) const {
    const int64_t n = tokens(item);
    if (n < 0 || n > job_.max_blocks * job_.block) {
      throw Refusal("A block list claims " + std::to_string(n) + " tokens where its table holds " +
                        std::to_string(job_.max_blocks * job_.block) + ".",
                    "tokens must lie between 0 and max_blocks * block.");
    }
    return n / job_.block * per_block_ + (n % job_.block + rows_ - 1) / rows_;
  }

  AttendTile tile(int64_t item, int64_t j) const {
    const int64_t at = j / per_block_;
    const int row = static_cast<int>(j % per_block_) * rows_;
    const uint8_t* block = block_of(item, at);
    AttendTile t;
    t.token0 = at * job_.block + row;
    t.n = static_cast<int>(std::min<int64_t>({rows_, job_.block - row, tokens(item) - t.token0}));
    t.k = block + layout_.k + row * layout_.k_stride;
    t.v = block + layout_.v + row * layout_.v_stride;
    t.stride = layout_.k_stride;  // of blocks with keys both strides are the same
    if (is_quantised(job_.elem)) {
      t.k_scale = reinterpret_cast<const uint16_t*>(block + layout_.k_scale);
      t.k_min = reinterpret_cast<const uint16_t*>(block + layout_.k_min);
      t.v_scale = reinterpret_cast<const uint16_t*>(block + layout_.v_scale) + row;
      t.v_min = reinterpret_cast<const uint16_t*>(block + layout_.v_min) + row;
    }
    return t;
  }

  // How many tiles ahead of the arithmetic memory should be asked for, in chunks of about so many.
  int64_t ahead(int64_t chunk) const {
    const int64_t distance =
        is_quantised(job_.elem) ? std::clamp(chunk * tile_bytes_ / kPart, kLeast, kAheadQuantised) : kAhead;
    return std::clamp<int64_t>((distance + tile_bytes_ - 1) / tile_bytes_, 1, 16);
  }

  // What tile j reads.
  AttendFetch fetch(int64_t item, int64_t j) const {
    const AttendTile t = tile(item, j);
    if (per_block_ == 1) return {t.k, t.k + layout_.bytes, nullptr, nullptr};
    const int64_t bytes = t.n * layout_.k_stride;
    return {t.k, t.k + bytes, t.v, t.v + bytes};
  }
  void fetch_now(int64_t item, int64_t j) const {
    const AttendFetch f = fetch(item, j);
    for (const uint8_t* p = f.at; p < f.end; p += 64) __builtin_prefetch(p, 0, kAheadHint);
    for (const uint8_t* p = f.at2; p < f.end2; p += 64) __builtin_prefetch(p, 0, kAheadHint);
  }

 private:
  int64_t list(int64_t item) const {
    const int64_t seq = item / job_.kv_heads, row = job_.owners ? job_.owners[seq] : seq;
    return job_.table_heads == 1 ? row : row * job_.kv_heads + item % job_.kv_heads;
  }

  const uint8_t* block_of(int64_t item, int64_t at) const {
    const int32_t id = job_.table[list(item) * job_.max_blocks + at];
    if (id < 0 || id >= job_.num_blocks) {
      throw Refusal("Block " + std::to_string(id) + " is not one of the arena's " +
                        std::to_string(job_.num_blocks) + ".",
                    "A block table may only name blocks that the arena handed out.");
    }
    return job_.base + id * job_.block_stride + item % job_.kv_heads * job_.head_stride;
  }

  const AttendJob& job_;
  const BlockLayout layout_;
  int rows_;
  int64_t per_block_, tile_bytes_;
};

}  // namespace coattn
