// Every kernel of every instruction set the machine has, in buffers of exactly the right size so that the
// address sanitizer sees one byte too many, against double-precision loops.
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "block_layout.h"
#include "check.h"
#include "cpu_features.h"
#include "dispatch.h"
#include "element.h"
#include "errors.h"
#include "kernels/attend.h"
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

float bf16_to_f32(uint16_t x) {
  return std::bit_cast<float>(uint32_t{x} << 16);
}

uint16_t f32_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40);  // keep NaN a NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// A number as a row of floats holds it, which is what comes back.
float put(Elem elem, uint8_t* row, int64_t i, float x) {
  if (elem == Elem::f32) {
    std::memcpy(row + 4 * i, &x, sizeof(x));
    return x;
  }
  const uint16_t half = elem == Elem::bf16 ? f32_to_bf16(x) : f32_to_f16(x);
  std::memcpy(row + 2 * i, &half, sizeof(half));
  return elem == Elem::bf16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Blocks of one sequence on the heap, byte for byte, 64-byte aligned. What is not written is NaN.
struct Store {
  BlockLayout layout;
  int kv_heads;
  int64_t blocks;
  std::unique_ptr<uint8_t, void (*)(void*)> memory;
  std::vector<int32_t> table;
  std::vector<float> k, v;  // what the blocks hold, [tokens][kv_heads][head_size]; without keys v alone
  int64_t tokens;

  Store(Elem elem, int block, int heads, int head_size, int64_t n, bool keys)
      : layout(block_layout(elem, block, head_size, keys)),
        kv_heads(heads),
        blocks((n + block - 1) / block),
        memory(static_cast<uint8_t*>(
                   std::aligned_alloc(64, std::max<size_t>(64, blocks * heads * layout.bytes))),
               std::free),
        tokens(n) {
    std::memset(memory.get(), 0xff, static_cast<size_t>(blocks * heads * layout.bytes));
    for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(blocks - 1 - b));
    if (keys) k = normal(n * heads * head_size);
    v = normal(n * heads * head_size);
    for (int64_t b = 0; b < blocks; ++b) {
      for (int h = 0; h < heads; ++h) {
        uint8_t* to = memory.get() + (table[b] * heads + h) * layout.bytes;
        const int64_t first = b * block;
        const int held = static_cast<int>(std::min<int64_t>(block, n - first));
        if (!is_quantised(elem)) {
          plain(to, first, held, h);
        } else if (keys) {
          packed(to, first, held, h);
        } else {
          for (int t = 0; t < held; ++t) codes(to + layout.v + t * layout.v_stride, row(v, first + t, h));
        }
      }
    }
  }

  float* row(std::vector<float>& rows, int64_t token, int head) {
    return rows.data() + (token * kv_heads + head) * layout.head_size;
  }

  void plain(uint8_t* block, int64_t first, int n, int head) {
    for (int t = 0; t < n; ++t) {
      for (int d = 0; d < layout.head_size; ++d) {
        if (!k.empty()) {
          float& x = row(k, first + t, head)[d];
          x = put(layout.elem, block + layout.k + t * layout.row_bytes, d, x);
        }
        float& x = row(v, first + t, head)[d];
        x = put(layout.elem, block + layout.v + t * layout.row_bytes, d, x);
      }
    }
  }

  void packed(uint8_t* block, int64_t first, int n, int head) {
    const size_t size = static_cast<size_t>(layout.head_size);
    std::vector<float> keys, values;
    for (int t = 0; t < n; ++t) {
      keys.insert(keys.end(), row(k, first + t, head), row(k, first + t, head) + size);
      values.insert(values.end(), row(v, first + t, head), row(v, first + t, head) + size);
    }
    kernels().quantise(layout, keys.data(), values.data(), n, block);
    for (int t = 0; t < n; ++t)
      kernels().read_row(layout, block, t, row(k, first + t, head), row(v, first + t, head));
  }

  // A row of values alone: its codes, then a scale and a minimum of every group.
  void codes(uint8_t* to, float* x) {
    const int groups = layout.v_groups, width = layout.head_size / groups, levels = groups == 1 ? 255 : 15;
    std::memset(to, 0, static_cast<size_t>(layout.row_bytes));
    for (int g = 0; g < groups; ++g) {
      const uint16_t scale = f32_to_f16(6.0f / static_cast<float>(levels)), low = f32_to_f16(-3.0f - g);
      std::memcpy(to + layout.v_scale + g * layout.scale_group, &scale, sizeof(scale));
      std::memcpy(to + layout.v_min + g * layout.scale_group, &low, sizeof(low));
      for (int d = g * width; d < (g + 1) * width; ++d) {
        const uint8_t code = static_cast<uint8_t>(rng() % static_cast<unsigned>(levels + 1));
        to[d % (layout.head_size / groups)] |= static_cast<uint8_t>(g ? code << 4 : code);
        x[d] = f16_to_f32(low) + f16_to_f32(scale) * code;
      }
    }
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

std::vector<float> check_attend(Elem elem, Elem q_elem, int head_size, int group, int block, int64_t tokens,
                                bool weights, WorkerPool& pool) {
  constexpr int heads = 2;
  Store store(elem, block, heads, head_size, tokens, true);
  std::vector<float> q = normal(static_cast<size_t>(heads * group * head_size));
  std::vector<uint8_t> q_bytes(static_cast<size_t>(elem_bytes(q_elem, static_cast<int64_t>(q.size()))));
  for (size_t i = 0; i < q.size(); ++i) q[i] = put(q_elem, q_bytes.data(), static_cast<int64_t>(i), q[i]);
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
  return out;
}

std::vector<float> check_weighted_sum(Elem elem, int head_size, WorkerPool& pool) {
  constexpr int heads = 2, group = 5;
  constexpr int64_t n = 150;
  Store store(elem, 32, heads, head_size, 77, false);
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
  for (int h = 0; h < heads * group; ++h) {
    const int head = h / group;
    for (int d = 0; d < head_size; ++d) {
      double exact = 0;
      for (int t = 0; t < count[head]; ++t) {
        const int64_t at = (int64_t{index[head * n + t]} * heads + head) * head_size + d;
        exact += double{w[h * n + t]} * store.v[at];
      }
      CHECK(std::abs(out[h * head_size + d] - exact) < 1e-3);
    }
  }
  return out;
}

}  // namespace

TEST(attend_all_kernels) {
  WorkerPool pool(3, 100);
  for_isas([&](const std::string&) {
    for (const Elem e : {Elem::f32, Elem::bf16, Elem::f16, Elem::int8}) {
      for (int head_size : {64, 80, 128, 8, 40}) {
        for (int group : {1, 3, 8, 17}) {
          for (int64_t tokens : {0, 1, 33, 70}) {
            const Elem q = group == 3 ? Elem::f16 : group == 17 ? Elem::f32 : Elem::bf16;
            check_attend(e, q, head_size, group, 32, tokens, group == 3, pool);
          }
        }
      }
      check_attend(e, Elem::bf16, 64, 4, 100, 320, true, pool);
      check_attend(e, Elem::bf16, 64, 4, 7, 50, false, pool);
      check_attend(e, Elem::bf16, 32, 70, 32, 2100, false, pool);  // cut into pieces
    }
  });
}

TEST(weighted_sum_all_kernels) {
  WorkerPool pool(2, 100);
  for_isas([&](const std::string&) {
    for (int e = 0; e < kElems; ++e) {
      for (int head_size : {64, 40, 128}) check_weighted_sum(static_cast<Elem>(e), head_size, pool);
    }
  });
}

#if defined(__aarch64__)
TEST(neon_has_the_bits_of_generic) {
  if (!cpu_features().neon) return;  // hidden
  WorkerPool pool(1, 100);
  const auto same = [](const auto& call) {
    std::vector<std::vector<float>> out;
    for (const char* isa : {"generic", "neon"}) {
      rng.seed(1);
      force_isa(isa);
      out.push_back(call());
    }
    force_isa("");
    CHECK(out[0].size() == out[1].size());
    CHECK(std::memcmp(out[0].data(), out[1].data(), sizeof(float) * out[0].size()) == 0);
  };
  for (int e = 0; e < kElems; ++e) {
    const Elem elem = static_cast<Elem>(e);
    for (int head_size : {64, 40, 128}) {
      same([&] { return check_weighted_sum(elem, head_size, pool); });
      if (elem == Elem::int4) continue;
      for (int group : {1, 7}) {
        same([&] { return check_attend(elem, Elem::bf16, head_size, group, 32, 70, true, pool); });
      }
    }
  }
}
#endif

TEST(attention_over_int4_is_refused) {
  CHECK_THROWS(block_layout(Elem::int4, 32, 64), Refusal);
  for_isas(
      [](const std::string&) { CHECK_THROWS(attend_kernel_name(Elem::int4, Elem::bf16, 4, 64), Refusal); });
}
