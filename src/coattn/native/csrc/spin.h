// Waiting for a word in memory to change: spin while that is likely soon, then sleep on a futex.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace coattn {

inline void cpu_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Pauses, and now and then gives the core away: the thread we wait for may need it. Where every thread has a
// core of its own that is unlikely, and a yield to someone else's thread costs its whole time slice: then
// only after a wait much longer than usual.
class Backoff {
 public:
  static constexpr int kOwnCore = 256;  // pauses per yield of a thread that has a core to itself
  explicit Backoff(int pauses_per_yield)
      : pauses_(pauses_per_yield), patience_(pauses_per_yield < kOwnCore ? 0 : 64) {}
  // True now and then, which is when the caller should look at the clock.
  bool step() {
    cpu_pause();
    if (++count_ < pauses_) return false;
    count_ = 0;
    if (patience_ > 0) {
      --patience_;
    } else {
      sched_yield();
    }
    return true;
  }

 private:
  const int pauses_;  // between two looks at the clock; 256 take about 10 us
  int patience_;      // looks before the first yield
  int count_ = 0;
};

// A 32-bit word that one side advances and others wait on.
//
// Ordering: a waiter announces itself in `sleepers` and then re-reads the word; the advancing side writes the
// word and then reads `sleepers`. Both pairs are sequentially consistent, so at least one side sees the other
// and no wake-up is lost; the futex call itself re-checks the word under the kernel's lock.
class EventWord {
 public:
  uint32_t load() const { return word_.load(std::memory_order_acquire); }

  void advance() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr,
              0);
    }
  }

  // Returns the new value once it differs from `seen`.
  uint32_t wait_past(uint32_t seen, int64_t spin_ns, int pauses_per_yield) {
    Backoff backoff(pauses_per_yield);
    int64_t deadline = 0;
    while (true) {
      const uint32_t value = load();
      if (value != seen) return value;
      if (!backoff.step()) continue;
      const int64_t now = now_ns();
      if (deadline == 0) {
        deadline = now + spin_ns;
      } else if (now > deadline) {
        break;
      }
    }
    while (true) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      uint32_t value = word_.load(std::memory_order_seq_cst);
      if (value == seen) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr,
                0);
        value = load();
      }
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      if (value != seen) return value;
    }
  }

 private:
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  std::atomic<uint32_t> word_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace coattn
