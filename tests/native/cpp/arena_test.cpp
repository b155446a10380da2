#include "arena.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "errors.h"

using namespace coattn;

TEST(arena_keeps_its_budget_and_its_addresses) {
  WorkerPool pool(2);
  constexpr int64_t kBytes = 4864;
  Arena arena(kBytes, 40 << 20, -1);
  const int64_t capacity = arena.stats().capacity_blocks;
  uint8_t* const base = arena.base();
  CHECK(capacity == (40 << 20) / kBytes && arena.committed_blocks() == 0);
  for (const int64_t wanted : {int64_t{1}, int64_t{1000}, capacity}) {
    arena.grow(wanted * kBytes, pool);
    CHECK(arena.base() == base && arena.committed_blocks() >= wanted);
    std::memset(base + (wanted - 1) * kBytes, 7, kBytes);
    CHECK(base[0] == 7 && base[wanted * kBytes - 1] == 7);
  }
  CHECK(arena.committed_blocks() == capacity);
  CHECK_THROWS(arena.grow((40 << 20) + 1, pool), Refusal);
}

TEST(arena_grows_while_others_read) {
  WorkerPool pool(2);
  constexpr int64_t kBytes = 65536;
  Arena arena(kBytes, 256 << 20, -1);
  arena.grow(4 * kBytes, pool);
  std::memset(arena.base(), 5, 4 * kBytes);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      for (int64_t id = 0; id < 4; ++id) CHECK(arena.base()[id * kBytes + 77] == 5);
    }
  });
  std::vector<std::thread> growing;
  for (int u = 0; u < 3; ++u) {
    growing.emplace_back([&, u] {
      for (int64_t i = 1; i <= 40; ++i) {
        const int64_t blocks = 10 * (3 * i + u);
        arena.grow(blocks * kBytes, pool);
        CHECK(arena.committed_blocks() >= blocks);
        std::memset(arena.base() + (blocks - 1) * kBytes, 9, 64);  // nobody else's
      }
    });
  }
  for (auto& t : growing) t.join();
  stop = true;
  reader.join();
  CHECK(arena.stats().committed_bytes >= 10 * 122 * kBytes);
}

TEST(arena_without_cuda_says_why) {
  const std::string reason = CudaHost::unavailable(0);
  if (!reason.empty()) CHECK_THROWS(Arena(4096, 1 << 20, 0), Refusal);
}
