#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <cstdlib>
#include <fstream>
#include <numeric>

#include "errors.h"
#include "mapping.h"

namespace coattn {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHuge = int64_t{2} << 20;
constexpr int64_t kMostUnit = int64_t{512}
                              << 20;  // memory is mapped in huge pages' worth of blocks up to here

int64_t round_up(int64_t x, int64_t to) {
  return (x + to - 1) / to * to;
}

// Pieces end on a border of blocks and of pages, so that no block lies in two CUDA registrations; on a border
// of huge pages too, unless that would make them enormous.
int64_t granularity(int64_t block_bytes) {
  const int64_t huge = std::lcm(block_bytes, kHuge);
  return huge <= kMostUnit ? huge : std::lcm(block_bytes, kPage);
}

double seconds(int64_t ns) {
  return static_cast<double>(ns) * 1e-9;
}

// Bytes of [lo, hi) that the kernel backs with huge pages.
int64_t huge_bytes(uintptr_t lo, uintptr_t hi) {
  std::ifstream file("/proc/self/smaps");
  std::string line;
  bool inside = false;
  int64_t total = 0;
  while (std::getline(file, line)) {
    // strtoull, not a stream: see quota_v2 in topology.cpp. A head line is "7f00-7f01 rw-p ...", others have
    // a colon.
    char* end = nullptr;
    const uintptr_t from = std::strtoull(line.c_str(), &end, 16);
    if (end != line.c_str() && *end == '-') {
      const uintptr_t to = std::strtoull(end + 1, nullptr, 16);
      inside = from < hi && to > lo;
    } else if (inside && line.rfind("AnonHugePages:", 0) == 0) {
      total += std::stoll(line.substr(14)) * 1024;
    }
  }
  return total;
}

}  // namespace

Arena::Arena(int64_t block_bytes, int64_t budget_bytes, int cuda_device)
    : block_bytes_(block_bytes),
      capacity_(block_bytes > 0 ? budget_bytes / block_bytes : 0),
      budget_(budget_bytes) {
  if (block_bytes < 64 || block_bytes % 64 != 0) {
    throw Refusal("Arena blocks of " + std::to_string(block_bytes) + " bytes are not a multiple of 64.",
                  "Use the bytes that block_layout gives, times the KV heads.");
  }
  if (capacity_ < 1) {
    throw Refusal("A budget of " + std::to_string(budget_bytes) + " bytes holds no block of " +
                      std::to_string(block_bytes) + ".",
                  "Give the arena at least one block's bytes.");
  }
  if (capacity_ > INT32_MAX) {
    throw Refusal("The budget holds more than 2^31 blocks.", "Use larger blocks; ids are 32-bit.");
  }
  if (cuda_device >= 0) cuda_ = std::make_unique<CudaHost>(cuda_device);
  reserved_ = round_up(capacity_ * block_bytes, kHuge) + 2 * kHuge;
  void* p = mmap(nullptr, static_cast<size_t>(reserved_), PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw Refusal("The system could not reserve " + std::to_string(reserved_) +
                      " bytes of addresses: " + std::strerror(errno) + ".",
                  "Lower the budget, or raise the limit on virtual memory (ulimit -v).");
  }
  map_ = static_cast<uint8_t*>(p);
  base_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<intptr_t>(map_), kHuge));
}

Arena::~Arena() {
  for (auto& [at, bytes] : registered_) cuda_->remove(at);
  munmap(map_, static_cast<size_t>(reserved_));
}

int64_t Arena::committed_blocks() {
  std::lock_guard lock(mutex_);
  return committed_ / block_bytes_;
}

void Arena::grow(int64_t bytes, WorkerPool& pool) {
  std::lock_guard lock(mutex_);
  if (bytes > budget_) {
    throw Refusal("The arena was asked for " + std::to_string(bytes) + " bytes of a budget of " +
                      std::to_string(budget_) + ".",
                  "Raise the arena's budget.");
  }
  const int64_t target = std::min(capacity_, (bytes + block_bytes_ - 1) / block_bytes_);
  grow_locked(target - committed_ / block_bytes_, pool);
}

void Arena::grow_locked(int64_t blocks, WorkerPool& pool) {
  const int64_t unit = granularity(block_bytes_), limit = round_up(capacity_ * block_bytes_, kPage);
  const int64_t target =
      std::min(limit, round_up(committed_ + std::max<int64_t>(blocks, 0) * block_bytes_, unit));
  if (committed_ < target) {
    // One piece, registered at once: a copy by the GPU's copy engine may not cross from one registration into
    // the next, and callers copy across block borders.
    uint8_t* at = base_ + committed_;
    const int64_t bytes = target - committed_;
    if (mprotect(at, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) != 0) {
      throw Refusal(
          "The system could not provide " + std::to_string(bytes) + " bytes: " + std::strerror(errno) + ".",
          "Lower the arena's budget, or free memory.");
    }
    (void)madvise(at, static_cast<size_t>(bytes), MADV_HUGEPAGE);  // a wish; ordinary pages work too
    int64_t start = now_ns();
    touch(at, static_cast<size_t>(bytes), pool);
    touch_seconds_ += seconds(now_ns() - start);
    if (cuda_) {
      // A child that wrote to a pinned page would get a copy the GPU does not see.
      (void)madvise(at, static_cast<size_t>(bytes), MADV_DONTFORK);
      start = now_ns();
      cuda_->add(at, static_cast<size_t>(bytes));
      register_seconds_ += seconds(now_ns() - start);
      registered_.emplace_back(at, bytes);
    }
    committed_ = target;
  }
  const int64_t before = static_cast<int64_t>(used_.size()),
                after = std::min(capacity_, committed_ / block_bytes_);
  used_.resize(static_cast<size_t>(after), 0);
  std::vector<int32_t> fresh;
  for (int64_t id = after - 1; id >= before; --id) fresh.push_back(static_cast<int32_t>(id));
  free_.insert(free_.begin(), fresh.begin(), fresh.end());
}

std::vector<int32_t> Arena::allocate(int64_t n, WorkerPool& pool) {
  std::lock_guard lock(mutex_);
  if (n < 0 || used_count_ + n > capacity_) {
    throw Refusal("The arena's budget of " + std::to_string(budget_) + " bytes holds " +
                      std::to_string(capacity_) + " blocks; " + std::to_string(used_count_) +
                      " are in use and " + std::to_string(n) + " more were asked for.",
                  "Raise the arena's budget, or free sequences first.");
  }
  const int64_t missing = n - static_cast<int64_t>(free_.size());
  // An eighth more than needed, so that a growing sequence does not map memory block by block.
  if (missing > 0) {
    const int64_t room = capacity_ - static_cast<int64_t>(used_.size());
    grow_locked(std::min(room, std::max(missing, static_cast<int64_t>(used_.size()) / 8)), pool);
  }
  std::vector<int32_t> ids(free_.rbegin(), free_.rbegin() + n);
  free_.resize(free_.size() - static_cast<size_t>(n));
  for (int32_t id : ids) used_[id] = 1;
  used_count_ += n;
  peak_ = std::max(peak_, used_count_);
  return ids;
}

void Arena::free(const std::vector<int32_t>& ids) {
  std::lock_guard lock(mutex_);
  size_t done = 0;
  for (; done < ids.size(); ++done) {
    const int32_t id = ids[done];
    if (id < 0 || id >= static_cast<int64_t>(used_.size()) || !used_[id]) break;
    used_[id] = 0;
  }
  if (done < ids.size()) {
    for (size_t i = 0; i < done; ++i) used_[ids[i]] = 1;
    throw Refusal("Block " + std::to_string(ids[done]) + " was freed but is not in use.",
                  "Free each block once; this is a bug in the caller.");
  }
  // Reversed, so that blocks come back in the order in which they were handed out.
  free_.insert(free_.end(), ids.rbegin(), ids.rend());
  used_count_ -= static_cast<int64_t>(ids.size());
}

void Arena::check_integrity() {
  std::lock_guard lock(mutex_);
  auto wrong = [](const std::string& what) {
    throw Refusal("The arena's books do not agree: " + what + ".",
                  "This is a bug in coattn; please report it.");
  };
  const int64_t known = static_cast<int64_t>(used_.size());
  if (known * block_bytes_ > committed_) wrong("more blocks than committed memory");
  std::vector<uint8_t> seen(used_);
  for (int32_t id : free_) {
    if (id < 0 || id >= known) wrong("the free list holds block " + std::to_string(id));
    if (seen[id]) wrong("block " + std::to_string(id) + " is free twice, or free and in use");
    seen[id] = 1;
  }
  const int64_t in_use = std::count(used_.begin(), used_.end(), uint8_t{1});
  if (in_use != used_count_) wrong("the count of used blocks is off");
  if (in_use + static_cast<int64_t>(free_.size()) != known) wrong("blocks are neither free nor in use");
}

ArenaStats Arena::stats() {
  std::lock_guard lock(mutex_);
  ArenaStats s{};
  s.block_bytes = block_bytes_;
  s.budget_bytes = budget_;
  s.committed_bytes = committed_;
  for (auto& [at, bytes] : registered_) s.registered_bytes += bytes;
  s.huge_bytes =
      huge_bytes(reinterpret_cast<uintptr_t>(base_), reinterpret_cast<uintptr_t>(base_) + committed_);
  s.capacity_blocks = capacity_;
  s.committed_blocks = static_cast<int64_t>(used_.size());
  s.used_blocks = used_count_;
  s.peak_blocks = peak_;
  s.touch_seconds = touch_seconds_;
  s.register_seconds = register_seconds_;
  return s;
}

}  // namespace coattn
