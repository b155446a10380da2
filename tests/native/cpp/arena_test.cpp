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
  constexpr int64_t kBudget = (39 << 20) + 12345;
  Arena arena(kBudget, false);
  uint8_t* const base = arena.base();
  CHECK(arena.committed() == 0);
  for (const int64_t wanted : {int64_t{1}, int64_t{5} << 20, kBudget}) {
    arena.grow(wanted, pool);
    CHECK(arena.base() == base && arena.committed() >= wanted);
    base[wanted - 1] = 7;
    CHECK(base[0] == 7);
  }
  CHECK(arena.committed() == 40 << 20);
  CHECK_THROWS(arena.grow(kBudget + 1, pool), Refusal);
  CHECK_THROWS(Arena(0, false), Refusal);
}

TEST(arena_grows_while_others_read) {
  WorkerPool pool(2);
  constexpr int64_t kBytes = 65536;
  Arena arena(256 << 20, false);
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
        CHECK(arena.committed() >= blocks * kBytes);
        std::memset(arena.base() + (blocks - 1) * kBytes, 9, 64);  // nobody else's
      }
    });
  }
  for (auto& t : growing) t.join();
  stop = true;
  reader.join();
  CHECK(arena.committed() >= 10 * 122 * kBytes);
}
