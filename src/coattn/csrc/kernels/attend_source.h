// Where an attend job's tiles are: the two kinds of sources behind one question, "tile j of item i".
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
  // int8 with 16, 32 and 64 KiB 1,609 / 1,627 / 1,521 (8), int4 1,614 / 1,528 / 1,360 (8).
  static constexpr int64_t kAhead = 32768, kAheadQuantised = 65536;
  // Quantised: no more than this part of a chunk, for it starts with as much in one burst. Measured with two
  // threads and jobs of 64 int8 blocks in chunks of 16 and fewer: best 43 us with 16 KiB, 46 with 32, 57 with
  // 64.
  static constexpr int64_t kPart = 8, kLeast = 16384;

 public:
  explicit AttendSource(const AttendJob& job)
      : job_(job), layout_(block_layout(job.elem, job.table ? job.block : 1, job.head_size)) {
    // Two tiles of keys and values (this one and the one being fetched) should fit the L1 cache.
    rows_ = layout_.row_bytes >= 256 ? 32 : kTileRows;
    per_block_ = job.table ? (job.block + rows_ - 1) / rows_ : 0;
    tile_bytes_ = 2 * (job.table ? std::min(rows_, job.block) : rows_) * layout_.row_bytes;
  }

  int64_t tokens(int64_t item) const {
    if (job_.table) return job_.tokens[list(item)];
    int64_t n = 0;
    for (int r = 0; r < job_.max_runs; ++r) n += run(item, r)[1];
    return n;
  }

  // Refuses lists that do not fit their table or their rows.
  int64_t tiles(int64_t item) const {
    if (job_.table) {
      const int64_t n = tokens(item);
      if (n < 0 || n > job_.max_blocks * job_.block) {
        throw Refusal("A block list claims " + std::to_string(n) + " tokens where its table holds " +
                          std::to_string(job_.max_blocks * job_.block) + ".",
                      "tokens must lie between 0 and max_blocks * block.");
      }
      return n / job_.block * per_block_ + (n % job_.block + rows_ - 1) / rows_;
    }
    int64_t count = 0;
    for (int r = 0; r < job_.max_runs; ++r) {
      const int32_t* range = run(item, r);
      if (range[0] < 0 || range[1] < 0 || int64_t{range[0]} + range[1] > job_.rows) {
        throw Refusal("A run of " + std::to_string(range[1]) + " rows from row " + std::to_string(range[0]) +
                          " leaves its buffer of " + std::to_string(job_.rows) + " rows.",
                      "first and count must not be negative, and first + count at most the rows there are.");
      }
      count += (range[1] + rows_ - 1) / rows_;
    }
    return count;
  }

  AttendTile tile(int64_t item, int64_t j) const {
    return job_.table ? block_tile(item, j) : run_tile(item, j);
  }

  // How many tiles ahead of the arithmetic memory should be asked for, in chunks of about so many.
  int64_t ahead(int64_t chunk) const {
    const int64_t distance =
        is_quantised(job_.elem) ? std::clamp(chunk * tile_bytes_ / kPart, kLeast, kAheadQuantised) : kAhead;
    return std::clamp<int64_t>((distance + tile_bytes_ - 1) / tile_bytes_, 1, 16);
  }

  // What tile j reads. Rows with gaps between them are left to the hardware.
  AttendFetch fetch(int64_t item, int64_t j) const {
    const AttendTile t = tile(item, j);
    const int64_t row = layout_.row_bytes;
    if (job_.table && per_block_ == 1) return {t.k, t.k + layout_.bytes, nullptr, nullptr};
    AttendFetch f;
    if (t.k_stride == row) f = {t.k, t.k + t.n * row, nullptr, nullptr};
    if (t.v_stride == row) {
      f.at2 = t.v;
      f.end2 = t.v + t.n * row;
    }
    return f;
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
  const int32_t* run(int64_t item, int r) const {
    const int64_t row = job_.run_heads == 1 ? item / job_.kv_heads : item;
    return job_.runs + 2 * (row * job_.max_runs + r);
  }

  AttendTile block_tile(int64_t item, int64_t j) const {
    const int64_t at = j / per_block_;
    const int row = static_cast<int>(j % per_block_) * rows_;
    const int32_t id = job_.table[list(item) * job_.max_blocks + at];
    if (id < 0 || id >= job_.num_blocks) {
      throw Refusal("Block " + std::to_string(id) + " is not one of the arena's " +
                        std::to_string(job_.num_blocks) + ".",
                    "A block table may only name blocks that the arena handed out.");
    }
    const uint8_t* block = job_.base + id * job_.block_stride + item % job_.kv_heads * job_.head_stride;
    AttendTile t;
    t.token0 = at * job_.block + row;
    t.n = static_cast<int>(std::min<int64_t>({rows_, job_.block - row, tokens(item) - t.token0}));
    t.k = block + layout_.k + row * layout_.row_bytes;
    t.v = block + layout_.v + row * layout_.row_bytes;
    t.k_stride = t.v_stride = layout_.row_bytes;
    if (is_quantised(job_.elem)) {
      t.k_scale = reinterpret_cast<const uint16_t*>(block + layout_.k_scale);
      t.k_min = reinterpret_cast<const uint16_t*>(block + layout_.k_min);
      t.v_scale = reinterpret_cast<const uint16_t*>(block + layout_.v_scale) + row;
      t.v_min = reinterpret_cast<const uint16_t*>(block + layout_.v_min) + row;
      t.v_group_stride = job_.block;
    }
    return t;
  }

  AttendTile run_tile(int64_t item, int64_t j) const {
    AttendTile t;
    for (int r = 0; r < job_.max_runs; ++r) {
      const int32_t* range = run(item, r);
      const int64_t count = (range[1] + rows_ - 1) / rows_;
      if (j >= count) {
        j -= count;
        t.token0 += range[1];
        continue;
      }
      const int64_t row = range[0] + j * rows_, seq = item / job_.kv_heads, head = item % job_.kv_heads;
      t.k = job_.k + seq * job_.k_seq + head * job_.k_head + row * job_.k_row;
      t.v = job_.v + seq * job_.v_seq + head * job_.v_head + row * job_.v_row;
      t.k_stride = job_.k_row;
      t.v_stride = job_.v_row;
      t.n = static_cast<int>(std::min<int64_t>(rows_, range[1] - j * rows_));
      t.token0 += j * rows_;
      break;
    }
    return t;
  }

  const AttendJob& job_;
  const BlockLayout layout_;
  int rows_;
  int64_t per_block_, tile_bytes_;
};

}  // namespace coattn
