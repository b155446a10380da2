// Splitting items of unequal length over the pool, with results that do not depend on timing.
//
// The items' tiles form one long list, cut into chunks. Where the cuts fall depends on the lengths and the
// number of workers only; which worker takes a chunk is decided by a counter. An item cut in several pieces
// leaves one partial result per piece, and whoever finishes its last piece merges them in order of position.
//
// Chunks get smaller towards the end: each is a share of what is left. So most of the work is in long chunks,
// within which memory is asked for ahead, and the last ones are so short that nobody waits long for anybody.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "worker_pool.h"

namespace coattn {

class SplitPlan {
 public:
  // Whether a part is its chunk's first, and its last. After one that is not comes the next item's first
  // tile.
  struct Place {
    bool first, last;
  };

  // tiles(item) for items 0..items-1. Keeps its memory between calls. fixed: an item is cut after every so
  // many tiles, whatever the others and the workers are; 0: as above.
  template <class Tiles>
  void build(int64_t items, int workers, int64_t min_tiles, Tiles&& tiles, int64_t fixed = 0) {
    first_.resize(static_cast<size_t>(items) + 1);
    first_[0] = 0;
    for (int64_t i = 0; i < items; ++i) first_[i + 1] = first_[i] + tiles(i);
    const int64_t total = first_[items];
    cut_.assign(1, 0);
    for (int64_t i = 0; fixed && i < items; ++i) {
      for (int64_t at = first_[i]; at < first_[i + 1];)
        cut_.push_back(at = std::min(at + fixed, first_[i + 1]));
    }
    while (cut_.back() < total) {
      const int64_t left = total - cut_.back(), size = share(left, workers, min_tiles);
      const int64_t cut = left - size < min_tiles ? total : snap(cut_.back() + size, size);
      cut_.push_back(cut > cut_.back() ? cut : cut_.back() + size);
    }
    chunks_ = static_cast<int64_t>(cut_.size()) - 1;
    if (static_cast<int64_t>(pieces_size_) < items) {
      pieces_ = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(items));
      pieces_size_ = static_cast<size_t>(items);
    }
    for (int64_t i = 0; i < items; ++i) pieces_[i].store(0, std::memory_order_relaxed);
    for (int64_t c = 0; c < chunks_; ++c) {
      for_parts(c, [&](int64_t item, int64_t, int64_t, Place) {
        pieces_[item].fetch_add(1, std::memory_order_relaxed);
      });
    }
    next_.store(0, std::memory_order_relaxed);
  }

  // The next chunk of what is left: half of a worker's part of it. One worker needs no cuts.
  static int64_t share(int64_t left, int workers, int64_t min_tiles) {
    if (workers == 1) return left;
    return std::min(left, std::max(min_tiles, (left + 2 * workers - 1) / (2 * workers)));
  }

  int64_t chunks() const { return chunks_; }
  int64_t first_chunk() const { return chunks_ ? cut_[1] : 0; }  // tiles; later ones are hardly longer
  int64_t tiles(int64_t item) const { return first_[item + 1] - first_[item]; }

  // Calls work.whole(worker, item, tiles, place) or work.part(worker, item, lo, hi, place, slot), and
  // work.merge(worker, item, first_slot_of_each_piece) once per cut item.
  template <class Work>
  void run(WorkerPool& pool, Work& work) {
    if (chunks_ == 0) return;
    pool.run(Join::willing, [&](int worker, int) {
      std::vector<int64_t>& slots = slots_of(worker);
      for (int64_t c; (c = next_.fetch_add(1, std::memory_order_relaxed)) < chunks_;) {
        for_parts(c, [&](int64_t item, int64_t lo, int64_t hi, Place place) {
          if (lo == 0 && hi == tiles(item)) {
            work.whole(worker, item, hi, place);
            return;
          }
          work.part(worker, item, lo, hi, place, slot(c, place.first));
          // Release publishes this piece; acquire by the last one makes all pieces visible to it.
          if (pieces_[item].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
          slots.clear();
          for (int64_t d = chunk_of(first_[item]); d < chunks_ && cut_[d] < first_[item + 1]; ++d) {
            if (cut_[d + 1] > first_[item]) slots.push_back(slot(d, item_at(cut_[d]) == item));
          }
          work.merge(worker, item, slots);
        });
      }
    });
  }

  // One leading and one trailing partial result per chunk; items in between are whole.
  int64_t slots() const { return 2 * chunks_; }

 private:
  static int64_t slot(int64_t chunk, bool leading) { return 2 * chunk + (leading ? 0 : 1); }

  int64_t item_at(int64_t tile) const {
    return std::upper_bound(first_.begin(), first_.end(), tile) - first_.begin() - 1;
  }
  int64_t chunk_of(int64_t tile) const {
    return std::max<int64_t>(std::upper_bound(cut_.begin(), cut_.end(), tile) - cut_.begin() - 1, 0);
  }

  // A cut close to the border of an item, or within an item that is not much longer than the chunk, moves to
  // the border and saves a merge.
  int64_t snap(int64_t tile, int64_t size) const {
    const int64_t item = item_at(tile), before = tile - first_[item], after = first_[item + 1] - tile;
    const int64_t near = before + after <= 2 * size ? before + after : size / 8;
    if (std::min(before, after) > near) return tile;
    return before <= after ? first_[item] : first_[item + 1];
  }

  template <class F>
  void for_parts(int64_t chunk, F&& f) const {
    int64_t at = cut_[chunk];
    const int64_t end = cut_[chunk + 1];
    if (at >= end) return;
    for (int64_t item = item_at(at); at < end; ++item) {
      const int64_t stop = std::min(end, first_[item + 1]);
      if (stop > at) f(item, at - first_[item], stop - first_[item], Place{at == cut_[chunk], stop == end});
      at = stop;
    }
  }

  // Grown by run()'s workers, each its own.
  std::vector<int64_t>& slots_of(int) {
    thread_local std::vector<int64_t> slots;
    return slots;
  }

  std::vector<int64_t> first_;  // [items + 1] tiles before each item
  std::vector<int64_t> cut_;    // [chunks + 1]
  int64_t chunks_ = 0;
  std::unique_ptr<std::atomic<int>[]> pieces_;  // pieces of each item not yet done
  size_t pieces_size_ = 0;
  alignas(128) std::atomic<int64_t> next_{0};
};

}  // namespace coattn
