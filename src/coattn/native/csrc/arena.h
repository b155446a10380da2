// The DRAM tier: one range of addresses, reserved once, grown without moving.
//
//   base                committed                        budget
//   |  touched, on huge pages where the system has them  |  reserved addresses, no memory  |
//
// The arena never reads or writes what it holds. Addresses stay valid and fixed for its life, so readers on other
// threads and on the GPU need no lock while it grows. Its own state is behind one mutex.
#pragma once

#include <cstdint>
#include <mutex>

#include "worker_pool.h"

namespace coattn {

class Arena {
 public:
  // pinned: the caller registers the memory with CUDA; a child process does not get it.
  Arena(int64_t budget_bytes, bool pinned);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* base() const { return base_; }  // on a border of 2 MiB
  // Bytes that may be read now: whole pages of 2 MiB.
  int64_t committed();

  // Makes at least `bytes` of the budget ready for use: zeroed, touched by the pool's workers. Returns at once
  // where they already are. Refuses past the budget. Not touched: whoever writes first gets the page then.
  void grow(int64_t bytes, WorkerPool& pool, bool touched = true);

  // Bytes that the system backs with huge pages.
  int64_t huge_bytes();

 private:
  const int64_t budget_;
  const bool pinned_;
  int64_t reserved_ = 0;  // bytes mapped at map_
  uint8_t* map_ = nullptr;
  uint8_t* base_ = nullptr;

  std::mutex mutex_;
  int64_t committed_ = 0;
};

}  // namespace coattn
