// The DRAM tier: one range of addresses, reserved once, made of fixed-size blocks, grown without moving.
//
//   base                committed                        budget
//   | block 0 | block 1 | ...  touched, registered  ...  |  reserved addresses, no memory  |
//
// Owner: the arena. A block belongs to whoever allocated it until it is freed; the arena never reads or
// writes block contents. Addresses of committed blocks stay valid and fixed for the arena's life, so readers
// on other threads and on the GPU need no lock while it grows. The allocator's own state is behind one mutex.
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
  int64_t capacity_blocks, committed_blocks, used_blocks, peak_blocks;
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

  // Makes at least `bytes` of the budget ready for use. Returns at once where they already are.
  void grow(int64_t bytes, WorkerPool& pool);

  // n block ids, growing where needed. Refuses past the budget and then changes nothing.
  std::vector<int32_t> allocate(int64_t n, WorkerPool& pool);
  // Refuses ids that are not allocated (double frees among them) and then frees none.
  void free(const std::vector<int32_t>& ids);

  // Free list, ownership and counters agree. Throws a Refusal that names the first contradiction.
  void check_integrity();
  ArenaStats stats();

 private:
  void grow_locked(int64_t blocks, WorkerPool& pool);

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
  std::vector<int32_t> free_;  // ids below committed_ / block_bytes_, last in first out
  std::vector<uint8_t> used_;  // by id, 1 while handed out
  int64_t used_count_ = 0, peak_ = 0;
  double touch_seconds_ = 0, register_seconds_ = 0;
};

}  // namespace coattn
