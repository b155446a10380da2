#include "mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "errors.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace coattn {
namespace {

constexpr size_t kHuge = size_t{2} << 20;

void touch_piece(uint8_t* at, size_t bytes) {
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

}  // namespace

void touch(uint8_t* at, size_t bytes, WorkerPool& pool) {
  constexpr size_t kPiece = 8 * kHuge;
  pool.parallel_for(static_cast<int64_t>(bytes), static_cast<int64_t>(kPiece),
                    [&](int, int64_t lo, int64_t hi) { touch_piece(at + lo, static_cast<size_t>(hi - lo)); });
}

Mapping::Mapping(size_t bytes, WorkerPool& pool) {
  const size_t used = (bytes + kHuge - 1) / kHuge * kHuge;
  bytes_ = used + kHuge;
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    throw Refusal(
        "The system could not map " + std::to_string(bytes_) + " bytes: " + std::strerror(errno) + ".",
        "Ask for less memory, or free some.");
  }
  map_ = static_cast<uint8_t*>(p);
  data_ = map_ + (kHuge - reinterpret_cast<uintptr_t>(map_) % kHuge) % kHuge;
  (void)madvise(data_, used, MADV_HUGEPAGE);
  try {
    touch(data_, used, pool);
  } catch (...) {
    munmap(map_, bytes_);
    throw;
  }
}

Mapping::~Mapping() {
  munmap(map_, bytes_);
}

}  // namespace coattn
