// Every kernel of every instruction set the machine has, in buffers of exactly the right size so that the
// address sanitizer sees one byte too many, against double-precision loops.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "block_layout.h"
#include "check.h"
#include "dispatch.h"
#include "kernels/attend.h"
#include "kernels/block_rows.h"
#include "kernels/compact.h"
#include "kernels/score_digest.h"
#include "kernels/weighted_sum.h"

using namespace coattn;

namespace {

std::mt19937 rng(1);

std::vector<float> normal(size_t n) {
  std::normal_distribution<float> dist;
  std::vector<float> x(n);
  for (float& v : x) v = dist(rng);
  return x;
}

template <class F>
void for_isas(F&& f) {
  for (const IsaStatus& s : isas()) {
    if (!s.reason.empty()) continue;
    force_isa(s.name);
    f(s.name);
  }
  force_isa("");
}

// Blocks of one sequence on the heap, byte for byte, 64-byte aligned.
struct Store {
  BlockLayout layout;
  int kv_heads;
  int64_t blocks;
  std::unique_ptr<uint8_t, void (*)(void*)> memory;
  std::vector<int32_t> table;
  std::vector<float> k, v;  // what the blocks hold, read back
  int64_t tokens;

  Store(Elem elem, int block, int heads, int head_size, int64_t n, WorkerPool& pool)
      : layout(block_layout(elem, block, head_size)),
        kv_heads(heads),
        blocks((n + block - 1) / block),
        memory(static_cast<uint8_t*>(
                   std::aligned_alloc(64, std::max<size_t>(64, blocks * heads * layout.bytes))),
               std::free),
        tokens(n) {
    std::memset(memory.get(), 0xff, static_cast<size_t>(blocks * heads * layout.bytes));
    for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(blocks - 1 - b));
    k = normal(n * heads * head_size);
    v = normal(n * heads * head_size);
    if (n == 0) return;
    BlockRowsJob job = rows();
    write_blocks(job, pool);
    read_blocks(job, pool);
  }

  BlockRowsJob rows() {
    BlockRowsJob job{};
    job.k = k.data();
    job.v = v.data();
    job.row_elem = Elem::f32;
    job.k_token = job.v_token = int64_t{kv_heads} * layout.head_size;
    job.k_head = job.v_head = layout.head_size;
    job.tokens = tokens;
    job.kv_heads = kv_heads;
    job.head_size = layout.head_size;
    job.elem = layout.elem;
    job.base = memory.get();
    job.block_stride = kv_heads * layout.bytes;
    job.head_stride = layout.bytes;
    job.num_blocks = blocks;
    job.block = layout.block;
    job.blocks = table.data();
    job.block_count = blocks;
    return job;
  }

  EntrySource source() const {
    EntrySource s{};
    s.elem = layout.elem;
    s.kv_heads = kv_heads;
    s.head_size = layout.head_size;
    s.table = table.data();
    s.table_heads = 1;
    s.max_blocks = blocks;
    s.base = memory.get();
    s.block_stride = kv_heads * layout.bytes;
    s.head_stride = layout.bytes;
    s.num_blocks = blocks;
    s.block = layout.block;
    return s;
  }
};

double tolerance(Elem elem) {
  return is_quantised(elem) ? 2e-3 : 5e-5;
}

void check_attend(Elem elem, Elem q_elem, int head_size, int group, int block, int64_t tokens, bool weights,
                  WorkerPool& pool) {
  constexpr int heads = 2;
  Store store(elem, block, heads, head_size, tokens, pool);
  std::vector<float> q = normal(static_cast<size_t>(heads * group * head_size));
  std::vector<uint8_t> q_bytes(static_cast<size_t>(elem_bytes(q_elem, static_cast<int64_t>(q.size()))));
  kernels().convert(Elem::f32, q.data(), q_elem, q_bytes.data(), static_cast<int64_t>(q.size()));
  kernels().convert(q_elem, q_bytes.data(), Elem::f32, q.data(), static_cast<int64_t>(q.size()));
  std::vector<float> out(q.size(), 7), lse(heads * group, 7),
      w(static_cast<size_t>(heads * group * tokens), 7);
  const int32_t count = static_cast<int32_t>(tokens);
  AttendJob job{};
  job.seqs = job.q_tokens = 1;
  job.q_heads = heads * group;
  job.kv_heads = heads;
  job.head_size = head_size;
  job.q = q_bytes.data();
  job.q_elem = q_elem;
  job.q_head = head_size;
  job.scale = 1 / std::sqrt(static_cast<float>(head_size));
  job.elem = elem;
  job.table = store.table.data();
  int32_t unused = 0;
  if (store.table.empty()) job.table = &unused;
  job.tokens = &count;
  job.table_heads = 1;
  job.max_blocks = store.blocks;
  job.base = store.memory.get();
  job.block_stride = heads * store.layout.bytes;
  job.head_stride = store.layout.bytes;
  job.num_blocks = store.blocks;
  job.block = block;
  job.out = out.data();
  job.lse = lse.data();
  job.weights = weights ? w.data() : nullptr;
  job.max_tokens = tokens;
  attend(job, pool);
  for (int h = 0; h < heads * group; ++h) {
    std::vector<double> s(static_cast<size_t>(tokens)), exact(static_cast<size_t>(head_size));
    double top = -INFINITY, sum = 0;
    auto row = [&](const std::vector<float>& x, int64_t t) {
      return x.data() + (t * heads + h / group) * head_size;
    };
    for (int64_t t = 0; t < tokens; ++t) {
      for (int d = 0; d < head_size; ++d)
        s[t] += double{q[h * head_size + d]} * row(store.k, t)[d] * job.scale;
      top = std::max(top, s[t]);
    }
    for (double& x : s) sum += x = std::exp(x - top);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int d = 0; d < head_size; ++d) exact[d] += s[t] / sum * row(store.v, t)[d];
      if (weights) CHECK(std::abs(w[h * tokens + t] - s[t] / sum) < tolerance(elem));
    }
    for (int d = 0; d < head_size; ++d) CHECK(std::abs(out[h * head_size + d] - exact[d]) < tolerance(elem));
    if (tokens == 0) {
      CHECK(std::isinf(lse[h]) && lse[h] < 0);
    } else {
      CHECK(std::abs(lse[h] - (top + std::log(sum))) < tolerance(elem));
    }
  }
}

}  // namespace

TEST(attend_all_kernels) {
  WorkerPool pool(3, 100);
  for_isas([&](const std::string&) {
    for (int e = 0; e < kElems; ++e) {
      for (int head_size : {64, 80, 128, 8, 40}) {
        for (int group : {1, 3, 8, 17}) {
          for (int64_t tokens : {0, 1, 33, 70}) {
            const Elem q = group == 3 ? Elem::f16 : group == 17 ? Elem::f32 : Elem::bf16;
            check_attend(static_cast<Elem>(e), q, head_size, group, 32, tokens, group == 3, pool);
          }
        }
      }
      check_attend(static_cast<Elem>(e), Elem::bf16, 64, 4, 100, 320, true, pool);
      check_attend(static_cast<Elem>(e), Elem::bf16, 64, 4, 7, 50, false, pool);
      check_attend(static_cast<Elem>(e), Elem::bf16, 32, 70, 32, 2100, false, pool);  // cut into pieces
    }
  });
}

TEST(entries_all_kernels) {
  WorkerPool pool(2, 100);
  for_isas([&](const std::string&) {
    for (int e = 0; e < kElems; ++e) {
      const Elem elem = static_cast<Elem>(e);
      for (int head_size : {64, 40, 128}) {
        constexpr int heads = 2, group = 5;
        constexpr int64_t n = 150;
        Store store(elem, 32, heads, head_size, 77, pool);
        std::vector<int32_t> index(heads * n);
        for (int32_t& i : index) i = static_cast<int32_t>(rng() % 77);
        const std::vector<int32_t> count{static_cast<int32_t>(n), 3};
        const std::vector<float> w = normal(heads * group * n);
        std::vector<float> out(static_cast<size_t>(heads * group * head_size), 7);
        WeightedSumJob job{};
        job.source = store.source();
        job.seqs = 1;
        job.q_heads = heads * group;
        job.index = index.data();
        job.count = count.data();
        job.max_entries = n;
        job.weights = w.data();
        job.out = out.data();
        weighted_sum(job, pool);
        std::vector<float> k_out(static_cast<size_t>(heads * n * head_size)), v_out(k_out.size());
        CompactJob c{};
        c.source = job.source;
        c.seqs = 1;
        c.index = index.data();
        c.count = count.data();
        c.max_entries = n;
        c.out_elem = Elem::f32;
        c.k_out = reinterpret_cast<uint8_t*>(k_out.data());
        c.v_out = reinterpret_cast<uint8_t*>(v_out.data());
        c.k_head = c.v_head = n * head_size * 4;
        c.k_row = c.v_row = int64_t{head_size} * 4;
        compact(c, pool);
        for (int h = 0; h < heads * group; ++h) {
          const int head = h / group;
          for (int d = 0; d < head_size; ++d) {
            double exact = 0;
            for (int t = 0; t < count[head]; ++t) {
              const int64_t at = (int64_t{index[head * n + t]} * heads + head) * head_size + d;
              CHECK(k_out[(head * n + t) * head_size + d] == store.k[at]);
              CHECK(v_out[(head * n + t) * head_size + d] == store.v[at]);
              exact += double{w[h * n + t]} * store.v[at];
            }
            CHECK(std::abs(out[h * head_size + d] - exact) < 1e-3);
          }
        }
      }
    }
  });
}

TEST(score_digest_all_kernels) {
  WorkerPool pool(2, 100);
  for_isas([&](const std::string&) {
    for (int e = 0; e < kFloatElems; ++e) {
      for (int head_size : {64, 24, 128}) {
        for (bool two : {true, false}) {
          constexpr int64_t n = 70;
          const int width = two ? 2 * head_size : head_size, group = 3;
          std::vector<float> digest = normal(static_cast<size_t>(n * width));
          for (int64_t b = 0; two && b < n; ++b) {
            for (int d = 0; d < head_size; ++d) {
              float &low = digest[b * width + d], &high = digest[b * width + head_size + d];
              if (low > high) std::swap(low, high);
            }
          }
          std::vector<uint8_t> bytes(static_cast<size_t>(elem_bytes(static_cast<Elem>(e), n * width)));
          kernels().convert(Elem::f32, digest.data(), static_cast<Elem>(e), bytes.data(), n * width);
          kernels().convert(static_cast<Elem>(e), bytes.data(), Elem::f32, digest.data(), n * width);
          const std::vector<float> q = normal(static_cast<size_t>(group * head_size));
          std::vector<int32_t> table(n);
          for (int64_t b = 0; b < n; ++b) table[b] = static_cast<int32_t>(n - 1 - b);
          const int32_t count = n - 1;
          std::vector<float> out(static_cast<size_t>(group * n), 7);
          ScoreDigestJob job{};
          job.seqs = job.kv_heads = 1;
          job.q_heads = group;
          job.head_size = head_size;
          job.q = q.data();
          job.q_head = head_size;
          job.elem = static_cast<Elem>(e);
          job.two_sided = two;
          job.base = bytes.data();
          job.block_stride = elem_bytes(job.elem, width);
          job.num_blocks = n;
          job.table = table.data();
          job.count = &count;
          job.table_heads = 1;
          job.max_blocks = n;
          job.scale = 1;
          job.out = out.data();
          score_digest(job, pool);
          for (int g = 0; g < group; ++g) {
            for (int64_t b = 0; b < n - 1; ++b) {
              double exact = 0;
              for (int d = 0; d < head_size; ++d) {
                const double x = q[g * head_size + d], low = digest[table[b] * width + d];
                exact += two ? std::max(x * low, x * digest[table[b] * width + head_size + d]) : x * low;
              }
              CHECK(std::abs(out[g * n + b] - exact) < 1e-3);
            }
            CHECK(std::isinf(out[g * n + n - 1]));
          }
        }
      }
    }
  });
}
