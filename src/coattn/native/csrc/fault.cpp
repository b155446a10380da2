#include "fault.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "errors.h"

namespace coattn {
namespace {

struct Injected {
  std::mutex mutex;
  std::string kind;
  double seconds = 0;
  std::atomic<bool> set{false};
};

Injected& injected() {
  static Injected fault;
  return fault;
}

}  // namespace

void inject_fault(const std::string& kind, double seconds) {
  if (kind != "" && kind != "stall" && kind != "die" && kind != "throw" && kind != "odd") {
    throw Refusal("There is no fault '" + kind + "'.", "Use stall, die, throw, odd or nothing.");
  }
  Injected& f = injected();
  std::lock_guard lock(f.mutex);
  f.kind = kind;
  f.seconds = seconds;
  f.set.store(!kind.empty(), std::memory_order_release);
}

Fault take_fault() {
  Injected& f = injected();
  if (!f.set.load(std::memory_order_acquire)) return Fault::none;
  std::string kind;
  double seconds;
  {
    std::lock_guard lock(f.mutex);
    kind = std::exchange(f.kind, "");
    seconds = f.seconds;
    f.set.store(false, std::memory_order_release);
  }
  if (kind == "stall") std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  if (kind == "throw") throw std::runtime_error("a worker failed (injected)");
  if (kind == "odd") throw 1;  // no std::exception
  return kind == "die" ? Fault::die : Fault::none;
}

}  // namespace coattn
