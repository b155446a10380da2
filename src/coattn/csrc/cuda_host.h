// Registering host memory with CUDA through libcuda, found at run time: no CUDA at build time, none needed to
// import.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace coattn {

class CudaHost {
 public:
  // Why memory cannot be registered for this device; empty when it can.
  static std::string unavailable(int device);
  // Retains the device's primary context, the one PyTorch uses. Refuses with the reason.
  explicit CudaHost(int device);
  ~CudaHost();
  CudaHost(const CudaHost&) = delete;
  CudaHost& operator=(const CudaHost&) = delete;

  // Pinned and mapped for every context: the GPU may read and write it at the same address.
  void add(void* at, size_t bytes);
  void remove(void* at) noexcept;

 private:
  struct Driver;
  static const Driver& driver();
  int device_;
  void* context_ = nullptr;
};

}  // namespace coattn
