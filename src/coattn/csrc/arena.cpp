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
  return std::min(capacity_, committed_ / block_bytes_);
}

void Arena::grow(int64_t bytes, WorkerPool& pool) {
  std::lock_guard lock(mutex_);
  if (bytes > budget_) {
    throw Refusal("The arena was asked for " + std::to_string(bytes) + " bytes of a budget of " +
                      std::to_string(budget_) + ".",
                  "Raise the arena's budget.");
  }
  const int64_t wanted = std::min(capacity_, (bytes + block_bytes_ - 1) / block_bytes_) * block_bytes_;
  const int64_t limit = round_up(capacity_ * block_bytes_, kPage);
  const int64_t target = std::min(limit, round_up(wanted, granularity(block_bytes_)));
  if (target <= committed_) return;
  // One piece, registered at once: a copy by the GPU's copy engine may not cross from one registration into
  // the next, and callers copy across block borders.
  uint8_t* at = base_ + committed_;
  const int64_t more = target - committed_;
  if (mprotect(at, static_cast<size_t>(more), PROT_READ | PROT_WRITE) != 0) {
    throw Refusal(
        "The system could not provide " + std::to_string(more) + " bytes: " + std::strerror(errno) + ".",
        "Lower the arena's budget, or free memory.");
  }
  (void)madvise(at, static_cast<size_t>(more), MADV_HUGEPAGE);  // a wish; ordinary pages work too
  int64_t start = now_ns();
  touch(at, static_cast<size_t>(more), pool);
  touch_seconds_ += seconds(now_ns() - start);
  if (cuda_) {
    // A child that wrote to a pinned page would get a copy the GPU does not see.
    (void)madvise(at, static_cast<size_t>(more), MADV_DONTFORK);
    start = now_ns();
    cuda_->add(at, static_cast<size_t>(more));
    register_seconds_ += seconds(now_ns() - start);
    registered_.emplace_back(at, more);
  }
  committed_ = target;
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
  s.touch_seconds = touch_seconds_;
  s.register_seconds = register_seconds_;
  return s;
}

}  // namespace coattn
