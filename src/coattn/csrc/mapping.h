// Anonymous memory on huge pages where allowed, first touched by the whole pool.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker_pool.h"

namespace coattn {

// Faults in [at, at + bytes) for writing, each worker a share. Pages keep what they hold.
void touch(uint8_t* at, size_t bytes, WorkerPool& pool);

// A private mapping that lives as long as the object.
class Mapping {
 public:
  Mapping(size_t bytes, WorkerPool& pool);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_;
  size_t bytes_;
};

}  // namespace coattn
