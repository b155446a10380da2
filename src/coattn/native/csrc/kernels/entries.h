// Values of single entries (one token of one KV head) in blocks without keys, by their position in the sequence.
#pragma once

#include <cstdint>
#include <string>

#include "block_layout.h"
#include "errors.h"

namespace coattn {

struct EntrySource {
  Elem elem;
  int kv_heads, head_size;
  const int32_t* table;  // [seqs, table_heads, max_blocks], as in AttendJob
  int table_heads;
  int64_t max_blocks;
  const uint8_t* base;
  int64_t block_stride, head_stride, num_blocks;
  int block;
};

// Where an entry lies: a row of a block.
struct Entry {
  const uint8_t* block;
  int row;
  const uint8_t* v;
};

class Entries {
 public:
  explicit Entries(const EntrySource& s)
      : s_(s), layout_(block_layout(s.elem, s.block, s.head_size, false)) {}

  const BlockLayout& layout() const { return layout_; }

  // item = seq * kv_heads + head.
  Entry at(int64_t item, int32_t token) const {
    const int64_t seq = item / s_.kv_heads, head = item % s_.kv_heads;
    const int64_t room = s_.max_blocks * s_.block;
    if (token < 0 || token >= room) {
      throw Refusal(
          "Entry " + std::to_string(token) + " is outside the " + std::to_string(room) + " there are.",
          "Indices count tokens from the start of the sequence's list.");
    }
    const int64_t list = s_.table_heads == 1 ? seq : item;
    const int32_t id = s_.table[list * s_.max_blocks + token / s_.block];
    if (id < 0 || id >= s_.num_blocks) {
      throw Refusal(
          "Block " + std::to_string(id) + " is not one of the arena's " + std::to_string(s_.num_blocks) + ".",
          "A block table may only name blocks that the arena handed out.");
    }
    const uint8_t* block = s_.base + id * s_.block_stride + head * s_.head_stride;
    const int row = token % s_.block;
    return {block, row, block + layout_.v + row * layout_.v_stride};
  }

  // The same for one list again and again, without divisions.
  class List {
   public:
    List(const Entries& entries, int64_t item) : e_(entries), item_(item), shift_(log2_of(entries.s_.block)) {
      if (shift_ < 0) return;
      const EntrySource& s = entries.s_;
      const int64_t seq = item / s.kv_heads, head = item % s.kv_heads;
      ids_ = s.table + (s.table_heads == 1 ? seq : item) * s.max_blocks;
      base_ = s.base + head * s.head_stride;
      room_ = s.max_blocks * s.block;
    }

    Entry at(int32_t token) const {
      const EntrySource& s = e_.s_;
      if (shift_ < 0 || token < 0 || token >= room_) return e_.at(item_, token);
      const int32_t id = ids_[token >> shift_];
      if (id < 0 || id >= s.num_blocks) return e_.at(item_, token);
      const uint8_t* block = base_ + id * s.block_stride;
      const int row = token & (s.block - 1);
      return {block, row, block + e_.layout_.v + row * e_.layout_.v_stride};
    }

   private:
    static int log2_of(int block) { return block & (block - 1) ? -1 : __builtin_ctz(block); }

    const Entries& e_;
    const int64_t item_;
    const int shift_;  // -1: blocks of a size that is no power of two
    const int32_t* ids_ = nullptr;
    const uint8_t* base_ = nullptr;
    int64_t room_ = 0;
  };

 private:
  const EntrySource& s_;
  const BlockLayout layout_;
};

}  // namespace coattn
