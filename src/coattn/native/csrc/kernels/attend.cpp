#include "kernels/attend.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "dispatch.h"
#include "kernels/attend_source.h"
#include "kernels/split.h"

namespace coattn {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

const AttendKernel& choose(Elem elem, Elem q_elem, int group) {
  const Kernels& table = kernels();
  const int e = static_cast<int>(elem), q = q_elem == Elem::bf16;
  if (group >= table.large_group && table.large_attend[e][q].tile) return table.large_attend[e][q];
  if (!table.attend[e][q].tile) {
    throw Refusal(std::string("There is no attention over ") + elem_name(elem) + " blocks.",
                  "Keep keys in int8.");
  }
  return table.attend[e][q];
}

// One call on its way through the pool.
struct Work {
  const AttendJob& job;
  const AttendSource source;
  WorkerPool& pool;
  const Kernels& table;
  const AttendKernel& kernel;
  const int heads;    // query heads per KV head
  const int group;    // heads * q_tokens
  const int stride;   // head_size rounded up to 32
  int64_t ahead = 1;  // tiles between asking for memory and reading it
  std::vector<float>& partials;

  Work(const AttendJob& j, WorkerPool& p, std::vector<float>& scratch)
      : job(j),
        source(j),
        pool(p),
        table(kernels()),
        kernel(choose(j.elem, j.q_elem, j.q_heads / j.kv_heads * j.q_tokens)),
        heads(j.q_heads / j.kv_heads),
        group(heads * j.q_tokens),
        stride((j.head_size + 31) / 32 * 32),
        partials(scratch) {}

  // A partial result: acc [group][head_size], then max [group], then sum [group].
  int64_t partial_size() const { return int64_t{group} * (job.head_size + 2); }

  // Row of query g of an item in out, lse and weights.
  int64_t row(int64_t item, int g) const {
    const int64_t seq = item / job.kv_heads, head = item % job.kv_heads * heads + g % heads;
    return (seq * job.q_tokens + g / heads) * job.q_heads + head;
  }

  AttendGroup start(int worker, int64_t item, std::vector<float*>& weight_rows) const {
    AttendGroup s;
    s.group = group;
    s.head_size = job.head_size;
    s.stride = stride;
    s.scale = job.scale;
    s.softcap = job.softcap;
    const size_t padded = (static_cast<size_t>(group) + 15) / 16 * 16, rows = padded * stride;
    const size_t wide = static_cast<size_t>(job.head_size + 127) / 128 * 128, acc_rows = padded * wide;
    const size_t fold = (kFoldBytes * wide + kFoldExtra) / sizeof(float);
    auto* q = reinterpret_cast<float*>(
        pool.scratch(worker).get(sizeof(float) * (rows + 5 * acc_rows + fold + 3 * padded)));
    s.q = q;
    s.prep = q + rows;
    s.acc = s.prep + 3 * acc_rows;
    s.fold = s.acc + 2 * acc_rows;
    s.v_bias = s.fold + fold;
    s.max = s.v_bias + padded;
    s.sum = s.max + padded;
    const int64_t seq = item / job.kv_heads, head0 = item % job.kv_heads * heads;
    for (int g = 0; g < group; ++g) {
      const int64_t offset = seq * job.q_seq + g / heads * job.q_token + (head0 + g % heads) * job.q_head;
      const auto* src = static_cast<const uint8_t*>(job.q) + elem_bytes(job.q_elem, offset);
      table.widen(job.q_elem, src, q + static_cast<int64_t>(g) * stride, job.head_size);
      std::memset(q + static_cast<int64_t>(g) * stride + job.head_size, 0,
                  sizeof(float) * (stride - job.head_size));
    }
    if (job.weights) {
      weight_rows.resize(group);
      for (int g = 0; g < group; ++g) weight_rows[g] = job.weights + row(item, g) * job.max_tokens;
      s.weights = weight_rows.data();
    }
    return s;
  }

  // What is to be fetched while tile j of a part that ends at hi is computed: perhaps the next item's tiles.
  AttendFetch fetch(int64_t item, int64_t j, int64_t hi, SplitPlan::Place place) const {
    const int64_t at = j + ahead;
    if (at < hi) return source.fetch(item, at);
    if (place.last || at - hi >= source.tiles(item + 1)) return {};
    return source.fetch(item + 1, at - hi);
  }

  void compute(int worker, int64_t item, int64_t lo, int64_t hi, SplitPlan::Place place, float* acc,
               float* max, float* sum) const {
    thread_local std::vector<float*> weight_rows;
    AttendGroup s = start(worker, item, weight_rows);
    if (place.first || source.tiles(item - 1) < ahead) {
      for (int64_t j = lo; j < std::min(lo + ahead, hi); ++j) source.fetch_now(item, j);
    }
    kernel.begin(s);
    AttendTile tile = source.tile(item, lo);
    for (int64_t j = lo; j < hi; ++j) {
      AttendTile next;
      if (j + 1 < hi) next = source.tile(item, j + 1);
      s.fetch = fetch(item, j, hi, place);
      kernel.tile(s, tile, j + 1 < hi ? &next : nullptr);
      tile = next;
    }
    kernel.end(s, acc);
    std::memcpy(max, s.max, sizeof(float) * group);
    std::memcpy(sum, s.sum, sizeof(float) * group);
  }

  // (acc, max, sum) of one query -> normalised out and lse.
  void finish(int64_t item, int g, const float* acc, float max, float sum) const {
    const int64_t at = row(item, g);
    float* out = job.out + at * job.head_size;
    if (sum == 0) {
      if (!job.skip_empty) std::memset(out, 0, sizeof(float) * job.head_size);
      job.lse[at] = -kInf;
      return;
    }
    const float inverse = 1 / sum;
    for (int d = 0; d < job.head_size; ++d) out[d] = acc[d] * inverse;
    job.lse[at] = max + std::log(sum);
  }

  void whole(int worker, int64_t item, int64_t tiles, SplitPlan::Place place) const {
    thread_local std::vector<float> result;
    result.resize(static_cast<size_t>(partial_size()));
    float* max = result.data() + int64_t{group} * job.head_size;
    compute(worker, item, 0, tiles, place, result.data(), max, max + group);
    for (int g = 0; g < group; ++g) {
      finish(item, g, result.data() + int64_t{g} * job.head_size, max[g], max[group + g]);
    }
  }

  void part(int worker, int64_t item, int64_t lo, int64_t hi, SplitPlan::Place place, int64_t slot) const {
    float* acc = partials.data() + slot * partial_size();
    float* max = acc + int64_t{group} * job.head_size;
    compute(worker, item, lo, hi, place, acc, max, max + group);
  }

  void merge(int, int64_t item, const std::vector<int64_t>& slots) const {
    thread_local std::vector<float> acc;
    acc.resize(static_cast<size_t>(job.head_size));
    for (int g = 0; g < group; ++g) {
      float max = -kInf, sum = 0;
      auto piece = [&](int64_t slot) { return partials.data() + slot * partial_size(); };
      auto piece_max = [&](int64_t slot) { return piece(slot)[int64_t{group} * job.head_size + g]; };
      for (int64_t slot : slots) max = std::max(max, piece_max(slot));
      std::fill(acc.begin(), acc.end(), 0.0f);
      for (int64_t slot : slots) {
        const float factor = max > -kInf ? std::exp(piece_max(slot) - max) : 1.0f;
        const float* from = piece(slot) + int64_t{g} * job.head_size;
        sum += factor * piece(slot)[int64_t{group} * (job.head_size + 1) + g];
        for (int d = 0; d < job.head_size; ++d) acc[d] += factor * from[d];
      }
      finish(item, g, acc.data(), max, sum);
    }
  }

  // Scores were left in the weight rows; now that lse is known they become weights. A pass of its own, so
  // that one long row is spread over all workers.
  void weigh(int64_t items) const {
    constexpr int64_t kPiece = 2048;
    const int64_t pieces = (job.max_tokens + kPiece - 1) / kPiece, total = items * group * pieces;
    pool.parallel_for(total, 8, [&](int, int64_t lo, int64_t hi) {
      for (int64_t i = lo; i < hi; ++i) {
        const int64_t item = i / pieces / group, from = i % pieces * kPiece,
                      at = row(item, i / pieces % group);
        const int64_t end = std::min(from + kPiece, job.max_tokens), n = std::min(source.tokens(item), end);
        float* weights = job.weights + at * job.max_tokens;
        // All scores -inf: the weights are zero, not exp(-inf + inf).
        if (n > from) table.exp_minus(weights + from, n - from, job.lse[at] == -kInf ? 0 : job.lse[at]);
        const int64_t zero = std::max(n, from);
        std::memset(weights + zero, 0, sizeof(float) * static_cast<size_t>(end - zero));
      }
    });
  }
};

}  // namespace

const char* attend_kernel_name(Elem elem, Elem q_elem, int group, int) {
  return choose(elem, q_elem, group).name;
}

void attend(const AttendJob& job, WorkerPool& pool) {
  thread_local SplitPlan plan;
  thread_local std::vector<float> partials;
  Work work(job, pool, partials);
  const int64_t items = int64_t{job.seqs} * job.kv_heads;
  if (job.weights) {
    for (int64_t i = 0; i < items; ++i) {
      if (work.source.tokens(i) > job.max_tokens) {
        throw Refusal("A list of " + std::to_string(work.source.tokens(i)) +
                          " tokens does not fit weights for " + std::to_string(job.max_tokens) + ".",
                      "Make the last dimension of weights at least as long as the longest list.");
      }
    }
  }
  plan.build(items, pool.size(), 4, [&](int64_t item) { return work.source.tiles(item); }, job.piece);
  work.ahead = work.source.ahead(plan.first_chunk());
  partials.resize(static_cast<size_t>(plan.slots() * work.partial_size()));
  const std::vector<float> nothing(static_cast<size_t>(job.head_size));
  for (int64_t item = 0; item < items; ++item) {
    if (plan.tiles(item) != 0) continue;
    for (int g = 0; g < work.group; ++g) work.finish(item, g, nothing.data(), -kInf, 0);
  }
  plan.run(pool, work);
  if (job.weights) work.weigh(items);
}

}  // namespace coattn
