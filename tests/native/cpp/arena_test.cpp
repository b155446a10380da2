#include "arena.h"

#include <atomic>
#include <cstring>
#include <thread>

#include "check.h"
#include "errors.h"

using namespace coattn;

TEST(arena_hands_out_disjoint_blocks_and_keeps_books) {
  WorkerPool pool(2);
  Arena arena(4864, 40 << 20, -1);
  std::vector<int32_t> ids = arena.allocate(1000, pool);
  for (int32_t id : ids) std::memset(arena.base() + id * int64_t{4864}, id & 0xff, 4864);
  for (int32_t id : ids) {
    CHECK(arena.base()[id * int64_t{4864}] == (id & 0xff));
    CHECK(arena.base()[id * int64_t{4864} + 4863] == (id & 0xff));
  }
  arena.check_integrity();
  CHECK_THROWS(arena.allocate(arena.stats().capacity_blocks, pool), Refusal);
  arena.free(ids);
  CHECK_THROWS(arena.free({ids[0]}), Refusal);
  arena.check_integrity();
}

TEST(arena_grows_while_others_read_and_allocate) {
  WorkerPool pool(2);
  Arena arena(65536, 256 << 20, -1);
  const std::vector<int32_t> fixed = arena.allocate(4, pool);
  for (int32_t id : fixed) std::memset(arena.base() + id * int64_t{65536}, 5, 65536);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      for (int32_t id : fixed) CHECK(arena.base()[id * int64_t{65536} + 77] == 5);
    }
  });
  std::vector<std::thread> users;
  for (int u = 0; u < 3; ++u) {
    users.emplace_back([&] {
      for (int i = 0; i < 40; ++i) {
        std::vector<int32_t> ids = arena.allocate(10 + i, pool);
        for (int32_t id : ids) std::memset(arena.base() + id * int64_t{65536}, 9, 64);
        arena.free(ids);
      }
    });
  }
  for (auto& t : users) t.join();
  stop = true;
  reader.join();
  arena.check_integrity();
  CHECK(arena.stats().used_blocks == 4);
}

TEST(arena_without_cuda_says_why) {
  const std::string reason = CudaHost::unavailable(0);
  if (!reason.empty()) CHECK_THROWS(Arena(4096, 1 << 20, 0), Refusal);
}
