// One list filled by a thread of its own, in pieces, in buffers of exactly the right size; others may stop it.
#include "kernels/fill_rows.h"

#include <numeric>
#include <thread>
#include <vector>

#include "check.h"

using namespace coattn;

namespace {

constexpr int kBlock = 4, kSize = 8, kWidth = 12, kSources = 20;
constexpr int64_t kRow = kSize * sizeof(float), kBlockBytes = 2 * kBlock * kRow;

struct World {
  World() : source(kSources * kBlockBytes / sizeof(float)), memory(2 * kWidth * kBlockBytes / sizeof(float)) {
    std::iota(source.begin(), source.end(), 0.0f);
    for (int i = 0; i < kSources; ++i) id.push_back((i * 7) % kSources);
    for (int i = 0; i < kWidth; ++i) fresh.push_back(2 * i + 1);
  }

  int64_t fill(const std::vector<int32_t>& which, int64_t piece, const int32_t* stop) {
    const std::vector<float> weight(which.size(), 0.5f);
    const int64_t used = (stored[1] + kBlock - 1) / kBlock;
    WorkerPool pool(1);
    return fill_rows({static_cast<int64_t>(which.size()),
                      which.data(),
                      weight.data(),
                      id.data(),
                      reinterpret_cast<const uint8_t*>(source.data()),
                      kBlockBytes,
                      1,
                      fresh.data() + used,
                      table.data(),
                      kWidth,
                      stored.data(),
                      reinterpret_cast<uint8_t*>(memory.data()),
                      kBlock,
                      0,
                      kRow,
                      positions.data(),
                      weights.data(),
                      piece,
                      0.5,
                      stop},
                     pool);
  }

  // Entry n of the list is the row at that position of the sequence, key and value.
  void check(int n, int32_t position) const {
    const int64_t block = table[kWidth + n / kBlock], from = id[position / kBlock];
    CHECK(positions[block * kBlock + n % kBlock] == position);
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t to = (2 * block + half) * kBlock + n % kBlock,
                    at = (2 * from + half) * kBlock + position % kBlock;
      for (int d = 0; d < kSize; ++d) CHECK(memory[to * kSize + d] == source[at * kSize + d]);
    }
  }

  std::vector<float> source, memory;
  std::vector<int32_t> id, fresh, table = std::vector<int32_t>(2 * kWidth, -1), stored = {0, 0};
  std::vector<int32_t> positions = std::vector<int32_t>(2 * kWidth * kBlock, -1);
  std::vector<float> weights = std::vector<float>(2 * kWidth * kBlock);
};

}  // namespace

TEST(fill_rows_in_pieces) {
  for (int64_t piece : {kBlock, 3 * kBlock, 100 * kBlock}) {
    World world;
    std::vector<int32_t> first, then;
    for (int p = 0; p < 40; p += 2) first.push_back(p);
    for (int p = 41; p < 80; p += 2) then.push_back(p);
    CHECK(world.fill(first, piece, nullptr) == 20);
    CHECK(world.fill(then, piece, nullptr) == 20);
    CHECK(world.stored[1] == 40 && world.stored[0] == 0 && world.table[0] == -1);
    for (int n = 0; n < 20; ++n) world.check(n, first[static_cast<size_t>(n)]);
    for (int n = 0; n < 20; ++n) world.check(20 + n, then[static_cast<size_t>(n)]);
  }
}

TEST(fill_rows_until_somebody_stops_it) {
  World world;
  std::vector<int32_t> all(48);
  std::iota(all.begin(), all.end(), 0);
  int32_t stop = 0;
  std::thread other([&] { __atomic_store_n(&stop, 1, __ATOMIC_RELEASE); });
  const int64_t done = world.fill(all, kBlock, &stop);
  other.join();
  CHECK(done % kBlock == 0 && done == world.stored[1]);
  for (int n = 0; n < done; ++n) world.check(n, n);
  CHECK(world.stored[1] == 48 || world.fill({0}, kBlock, &stop) == 0);
}

TEST(fill_rows_refuses_what_does_not_fit) {
  World world;
  std::vector<int32_t> all(49, 0);
  bool refused = false;
  try {
    world.fill(all, kBlock, nullptr);
  } catch (const std::exception&) {
    refused = true;
  }
  CHECK(refused && world.stored[1] == 0);
}
