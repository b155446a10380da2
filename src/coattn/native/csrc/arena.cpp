#include "arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "errors.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace coattn {
namespace {

constexpr int64_t kHuge = int64_t{2} << 20;

int64_t round_up(int64_t x) {
  return (x + kHuge - 1) / kHuge * kHuge;
}

// Faults in [at, at + bytes) for writing. Pages keep what they hold.
void touch(uint8_t* at, size_t bytes) {
  // One system call a piece (Linux 5.14); where it is unknown, a write fault a page.
  if (madvise(at, bytes, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) {
    throw Refusal("The system could not provide " + std::to_string(bytes) +
                      " bytes of memory: " + std::strerror(errno) + ".",
                  "Ask for less memory, or free some.");
  }
  for (size_t i = 0; i < bytes; i += 4096) {
    // An atomic add of zero faults the page in for writing and cannot lose another thread's data.
    __atomic_fetch_add(at + i, 0, __ATOMIC_RELAXED);
  }
}

// Bytes of [lo, hi) that the kernel backs with huge pages.
int64_t backed_by_huge_pages(uintptr_t lo, uintptr_t hi) {
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

Arena::Arena(int64_t budget_bytes, bool pinned) : budget_(budget_bytes), pinned_(pinned) {
  if (budget_bytes < 1) {
    throw Refusal("An arena of " + std::to_string(budget_bytes) + " bytes holds nothing.", "Give it some.");
  }
  reserved_ = round_up(budget_bytes) + kHuge;
  void* p = mmap(nullptr, static_cast<size_t>(reserved_), PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw Refusal("The system could not reserve " + std::to_string(reserved_) +
                      " bytes of addresses: " + std::strerror(errno) + ".",
                  "Lower the budget, or raise the limit on virtual memory (ulimit -v).");
  }
  map_ = static_cast<uint8_t*>(p);
  base_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<intptr_t>(map_)));
}

Arena::~Arena() {
  munmap(map_, static_cast<size_t>(reserved_));
}

int64_t Arena::committed() {
  std::lock_guard lock(mutex_);
  return committed_;
}

void Arena::grow(int64_t bytes, WorkerPool& pool, bool touched) {
  std::lock_guard lock(mutex_);
  if (bytes > budget_) {
    throw Refusal("The arena was asked for " + std::to_string(bytes) + " bytes of a budget of " +
                      std::to_string(budget_) + ".",
                  "Raise the arena's budget.");
  }
  const int64_t target = round_up(bytes);
  if (target <= committed_) return;
  uint8_t* at = base_ + committed_;
  const int64_t more = target - committed_;
  if (mprotect(at, static_cast<size_t>(more), PROT_READ | PROT_WRITE) != 0) {
    throw Refusal(
        "The system could not provide " + std::to_string(more) + " bytes: " + std::strerror(errno) + ".",
        "Lower the arena's budget, or free memory.");
  }
  (void)madvise(at, static_cast<size_t>(more), MADV_HUGEPAGE);  // a wish; ordinary pages work too
  if (touched) {
    pool.parallel_for(more, 8 * kHuge,
                      [&](int, int64_t lo, int64_t hi) { touch(at + lo, static_cast<size_t>(hi - lo)); });
  }
  // A child that wrote to a pinned page would get a copy the GPU does not see.
  if (pinned_) (void)madvise(at, static_cast<size_t>(more), MADV_DONTFORK);
  committed_ = target;
}

int64_t Arena::huge_bytes() {
  const uintptr_t start = reinterpret_cast<uintptr_t>(base_);
  return backed_by_huge_pages(start, start + static_cast<uintptr_t>(committed()));
}

}  // namespace coattn
