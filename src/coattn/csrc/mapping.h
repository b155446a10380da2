// Anonymous memory on huge pages where allowed, first touched by the whole pool.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker_pool.h"

namespace coattn {

// Faults in [at, at + bytes) for writing, each worker a share. Pages keep what they hold.
void touch(uint8_t* at, size_t bytes, WorkerPool& pool);

// A private mapping, aligned like the arena to huge pages, that lives as long as the object.
class Mapping {
 public:
  Mapping(size_t bytes, WorkerPool& pool);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* map_;   // what was mapped
  uint8_t* data_;  // where it starts on a huge page
  size_t bytes_;   // mapped
};

}  // namespace coattn
