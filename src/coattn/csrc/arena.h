// The DRAM tier: one range of addresses, reserved once, made of fixed-size blocks, grown without moving.
//
//   base                committed                        budget
//   | block 0 | block 1 | ...  touched, registered  ...  |  reserved addresses, no memory  |
//
// Who may use which block is the caller's business; the arena never reads or writes what blocks hold. Addresses
// of committed blocks stay valid and fixed for the arena's life, so readers on other threads and on the GPU
// need no lock while it grows. The arena's own state is behind one mutex.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_host.h"
#include "worker_pool.h"

namespace coattn {

struct ArenaStats {
  int64_t block_bytes, budget_bytes, committed_bytes, registered_bytes, huge_bytes;
  int64_t capacity_blocks;
  double touch_seconds, register_seconds;
};

class Arena {
 public:
  // cuda_device < 0: not registered. block_bytes is a multiple of 64.
  Arena(int64_t block_bytes, int64_t budget_bytes, int cuda_device);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint8_t* base() const { return base_; }
  int64_t block_bytes() const { return block_bytes_; }
  // Blocks that may be read now.
  int64_t committed_blocks();

  // Makes at least `bytes` of the budget ready for use. Returns at once where they already are. Refuses past
  // the budget.
  void grow(int64_t bytes, WorkerPool& pool);

  ArenaStats stats();

 private:
  const int64_t block_bytes_;
  const int64_t capacity_;  // blocks
  int64_t reserved_ = 0;    // bytes mapped at map_
  uint8_t* map_ = nullptr;
  uint8_t* base_ = nullptr;  // map_ on a 2 MiB border
  int64_t budget_;

  std::mutex mutex_;
  int64_t committed_ = 0;  // bytes
  std::unique_ptr<CudaHost> cuda_;
  std::vector<std::pair<uint8_t*, int64_t>> registered_;
  double touch_seconds_ = 0, register_seconds_ = 0;
};

}  // namespace coattn
