#include "cuda_host.h"

#include <dlfcn.h>

#include "errors.h"

namespace coattn {

// The few entry points of the driver API we need, with its stable C types.
struct CudaHost::Driver {
  std::string reason;
  int (*init)(unsigned) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*context_retain)(void**, int) = nullptr;
  int (*context_release)(int) = nullptr;
  int (*context_push)(void*) = nullptr;
  int (*context_pop)(void**) = nullptr;
  int (*host_register)(void*, size_t, unsigned) = nullptr;
  int (*host_unregister)(void*) = nullptr;
  int (*error_string)(int, const char**) = nullptr;

  std::string text(int code) const {
    const char* message = nullptr;
    if (!error_string || error_string(code, &message) != 0 || !message)
      return "CUDA error " + std::to_string(code);
    return message;
  }
};

const CudaHost::Driver& CudaHost::driver() {
  static const Driver driver = [] {
    Driver d;
    void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
      d.reason = "the CUDA driver library libcuda.so.1 is not installed";
      return d;
    }
    bool complete = true;
    auto load = [&](auto& fn, const char* name) {
      fn = reinterpret_cast<std::remove_reference_t<decltype(fn)>>(dlsym(lib, name));
      complete = complete && fn;
    };
    load(d.init, "cuInit");
    load(d.device_get, "cuDeviceGet");
    load(d.context_retain, "cuDevicePrimaryCtxRetain");
    load(d.context_release, "cuDevicePrimaryCtxRelease_v2");
    load(d.context_push, "cuCtxPushCurrent_v2");
    load(d.context_pop, "cuCtxPopCurrent_v2");
    load(d.host_register, "cuMemHostRegister_v2");
    load(d.host_unregister, "cuMemHostUnregister");
    load(d.error_string, "cuGetErrorString");
    if (!complete) {
      d.reason = "libcuda.so.1 lacks the functions that register memory";
    } else if (const int code = d.init(0); code != 0) {
      d.reason = "CUDA did not start: " + d.text(code);
    }
    return d;
  }();
  return driver;
}

std::string CudaHost::unavailable(int device) {
  const Driver& d = driver();
  if (!d.reason.empty()) return d.reason;
  int handle = 0;
  const int code = d.device_get(&handle, device);
  return code == 0 ? "" : "there is no CUDA device " + std::to_string(device) + ": " + d.text(code);
}

CudaHost::CudaHost(int device) {
  const std::string reason = unavailable(device);
  if (!reason.empty()) {
    throw Refusal("The arena cannot be registered with CUDA: " + reason + ".",
                  "Create it without registration, or run where a CUDA device is visible.");
  }
  driver().device_get(&device_, device);
  if (const int code = driver().context_retain(&context_, device_); code != 0) {
    throw Refusal("The CUDA device's context could not be used: " + driver().text(code) + ".",
                  "See whether another program holds the device.");
  }
}

CudaHost::~CudaHost() {
  driver().context_release(device_);
}

void CudaHost::add(void* at, size_t bytes) {
  constexpr unsigned kPortable = 1, kDeviceMap = 2;
  const Driver& d = driver();
  d.context_push(context_);
  const int code = d.host_register(at, bytes, kPortable | kDeviceMap);
  void* old = nullptr;
  d.context_pop(&old);
  if (code != 0) {
    throw Refusal("CUDA refused to register " + std::to_string(bytes) + " bytes: " + d.text(code) + ".",
                  "Lower the arena's budget, or raise the limit on locked memory (ulimit -l).");
  }
}

void CudaHost::remove(void* at) noexcept {
  const Driver& d = driver();
  d.context_push(context_);
  d.host_unregister(at);
  void* old = nullptr;
  d.context_pop(&old);
}

}  // namespace coattn
