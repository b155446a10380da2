// Rows added to lists of int8 blocks, in buffers of exactly the right size: every row that came is there,
// each within half a step for every time that it was rounded.
#include <cmath>
#include <random>
#include <vector>

#include "block_layout.h"
#include "check.h"
#include "dispatch.h"
#include "element.h"
#include "kernels/keep_rows.h"
#include "kernels/put_rows.h"

using namespace coattn;

namespace {

constexpr int kLists = 6, kWidth = 40;

struct World {
  World(int block, int size)
      : block(block),
        size(size),
        layout(block_layout(Elem::int8, block, size)),
        memory(static_cast<size_t>(kBlocks * layout.bytes), 0xFF),
        table(kLists * kWidth, -1),
        stored(kLists, 0),
        position(static_cast<size_t>(kBlocks * block), -1),
        weights(static_cast<size_t>(kBlocks * block), 0),
        came(kLists) {}

  // A block of random rows, the larger the later.
  std::vector<uint8_t> source(float scale) {
    std::normal_distribution<float> dist(scale, scale);
    std::vector<float> k(static_cast<size_t>(block * size)), v(k.size());
    for (float& x : k) x = dist(rng);
    for (float& x : v) x = dist(rng);
    std::vector<uint8_t> packed(static_cast<size_t>(layout.bytes));
    kernels().quantise(layout, k.data(), v.data(), block, packed.data());
    return packed;
  }

  void expect(int list, const std::vector<uint8_t>& from, int row) {
    std::vector<float> both(static_cast<size_t>(2 * size));
    kernels().read_row(layout, from.data(), row, both.data(), both.data() + size);
    came[static_cast<size_t>(list)].push_back(both);
  }

  void put(int rows, WorkerPool& pool) {
    const std::vector<uint8_t> from = source(1);
    std::vector<int64_t> list, first{0}, where;
    std::vector<int32_t> row;
    for (int i = 0; i < kLists; ++i) {
      list.push_back(i);
      for (int r = 0; r < rows + i; ++r) {
        where.push_back(reinterpret_cast<int64_t>(from.data()));
        row.push_back(r % block);
        expect(i, from, r % block);
      }
      first.push_back(static_cast<int64_t>(where.size()));
      const int need = (stored[i] + rows + i + block - 1) / block;
      for (int b = (stored[i] + block - 1) / block; b < need; ++b) table[i * kWidth + b] = next++;
    }
    put_rows({kLists, list.data(), first.data(), where.data(), row.data(), table.data(), kWidth,
              stored.data(), memory.data(), block, size, 0},
             pool);
    for (int i = 0; i < kLists; ++i) stored[i] += rows + i;
  }

  int keep(float scale, int every, WorkerPool& pool) {
    std::vector<std::vector<uint8_t>> from;
    std::vector<uint8_t> kept(static_cast<size_t>(kLists * block)), used(kLists);
    std::vector<float> weight(kept.size(), 1);
    std::vector<int64_t> where, list;
    std::vector<int32_t> first(kLists, 0), spare, other, moved(kLists);
    for (int i = 0; i < kLists; ++i) {
      from.push_back(source(scale));
      where.push_back(reinterpret_cast<int64_t>(from.back().data()));
      list.push_back(i);
      spare.push_back(next++);
      other.push_back(next++);
      for (int r = i % every; r < block; r += every) {
        kept[i * block + r] = 1;
        expect(i, from.back(), r);
      }
    }
    KeepRowsJob job{};
    job.count = kLists;
    job.block = block;
    job.row_bytes = size;
    job.kept = kept.data();
    job.weight = weight.data();
    job.source = where.data();
    job.first = first.data();
    job.list = list.data();
    job.spare = spare.data();
    job.used = used.data();
    job.table = table.data();
    job.width = kWidth;
    job.stored = stored.data();
    job.base = memory.data();
    job.position = position.data();
    job.weights = weights.data();
    job.head_size = size;
    job.other = other.data();
    job.moved = moved.data();
    keep_rows(job, pool);
    int count = 0;
    for (int i = 0; i < kLists; ++i) {
      if (moved[i] < 0) continue;
      table[i * kWidth + moved[i]] = other[i];
      ++count;
    }
    return count;
  }

  // times: how often a row may have been rounded.
  void check(int times) {
    std::vector<float> both(static_cast<size_t>(2 * size)), low(static_cast<size_t>(size)), high(low);
    for (int i = 0; i < kLists; ++i) {
      CHECK(stored[i] == static_cast<int>(came[i].size()));
      for (int n = 0; n < stored[i]; ++n) {
        const uint8_t* at = memory.data() + table[i * kWidth + n / block] * layout.bytes;
        kernels().read_row(layout, at, n % block, both.data(), both.data() + size);
        kernels().rows.held(layout, at, low.data(), high.data());
        for (int d = 0; d < size; ++d) {
          const float step = (high[d] - low[d]) / 255;
          CHECK(std::fabs(both[d] - came[i][n][d]) <= times * step / 2 * 1.01f + 1e-5f);
        }
      }
    }
  }

  static constexpr int kBlocks = 400;
  const int block, size;
  const BlockLayout layout;
  std::vector<uint8_t> memory;
  std::vector<int32_t> table, stored, position;
  std::vector<float> weights;
  std::vector<std::vector<std::vector<float>>> came;
  int32_t next = 0;
  std::mt19937 rng{1};
};

}  // namespace

TEST(packed_lists) {
  WorkerPool pool(3);
  for (const IsaStatus& isa : isas()) {
    if (!isa.reason.empty()) continue;
    force_isa(isa.name);
    for (const auto& [block, size] : {std::pair{32, 128}, {8, 72}, {5, 8}, {1, 16}}) {
      World world(block, size);
      world.put(3 * block + 1, pool);
      world.check(1);
      world.put(2, pool);
      int moved = 0;
      for (int n = 0; n < 10; ++n) moved += world.keep(1 + static_cast<float>(n), 4, pool);
      CHECK(moved > 0 || block == 1);
      world.check(8);
    }
  }
  force_isa("");
}

// Codes are rounded from a rounded product: where the product is just beside a tie, a multiplication that is
// fused with the rounding gives the neighbouring code, and two machines would write different blocks.
TEST(packed_codes_are_rounded_twice) {
  constexpr int kBlock = 32, kSize = 72;  // a vector's width and a rest on every instruction set
  const BlockLayout layout = block_layout(Elem::int8, kBlock, kSize);
  std::vector<float> k(kBlock * kSize), read(kSize);
  std::vector<uint8_t> block(static_cast<size_t>(layout.bytes), 0);
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> sizes(0.001f, 2.0f), lows(-300.0f, 300.0f);
  int beside = 0;
  for (const IsaStatus& isa : isas()) {
    if (!isa.reason.empty()) continue;
    force_isa(isa.name);
    auto* scale = reinterpret_cast<uint16_t*>(block.data() + layout.k_scale);
    auto* low = reinterpret_cast<uint16_t*>(block.data() + layout.k_min);
    for (int d = 0; d < kSize; ++d) {
      scale[d] = f32_to_f16(sizes(rng));
      low[d] = d % 2 ? f32_to_f16(lows(rng)) : 0;
      for (int t = 0; t < kBlock; ++t) {  // as near to code + 1/2 as floats are
        k[t * kSize + d] = f16_to_f32(low[d]) + f16_to_f32(scale[d]) * (static_cast<float>(7 * t) + 0.5f);
      }
    }
    kernels().rows.keys(layout, k.data(), 0, kBlock, block.data());
    for (int t = 0; t < kBlock; ++t) {
      const uint8_t* codes = block.data() + layout.k + t * layout.row_bytes;
      kernels().read_row(layout, block.data(), t, read.data(), nullptr);
      for (int d = 0; d < kSize; ++d) {
        // volatile: this file may be compiled to fuse what it likes
        const volatile float step = f16_to_f32(scale[d]), base = f16_to_f32(low[d]);
        const volatile float inverse = 1.0f / step, above = k[t * kSize + d] - base;
        const volatile float product = above * inverse, height = step * static_cast<float>(codes[d]);
        CHECK(codes[d] == static_cast<int>(std::nearbyint(product)));
        CHECK(read[d] == base + height);
        beside += std::nearbyint(static_cast<double>(above) * inverse) != std::nearbyint(product);
      }
    }
  }
  force_isa("");
  CHECK(beside > 100);  // numbers that a fused product rounds otherwise
}
