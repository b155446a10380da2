#include "kernels/weighted_sum.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "kernels/split.h"

namespace coattn {
namespace {

struct Work {
  const WeightedSumJob& job;
  const Entries entries;
  WorkerPool& pool;
  const Kernels& table = kernels();
  const int group, head_size, stride;
  std::vector<float>& partials;

  Work(const WeightedSumJob& j, WorkerPool& p, std::vector<float>& scratch)
      : job(j),
        entries(j.source),
        pool(p),
        group(j.q_heads / j.source.kv_heads),
        head_size(j.source.head_size),
        stride((head_size + 31) / 32 * 32),
        partials(scratch) {}

  int64_t partial_size() const { return int64_t{group} * head_size; }
  int64_t first_row(int64_t item) const {
    return item / job.source.kv_heads * job.q_heads + item % job.source.kv_heads * group;
  }

  // Values of quantised rows are min + scale * code: the scale goes into the weight, the minimum into a bias.
  void fold(const Entry& e, int t, float* w0, float* w1, float* bias) const {
    const BlockLayout& b = entries.layout();
    const int64_t row = e.row * b.scale_row;
    const auto* scale = reinterpret_cast<const uint16_t*>(e.block + b.v_scale + row);
    const auto* low = reinterpret_cast<const uint16_t*>(e.block + b.v_min + row);
    const int64_t second = (b.v_groups - 1) * b.scale_group / 2;
    const float low0 = f16_to_f32(low[0]), low1 = f16_to_f32(low[second]);
    const float scale0 = f16_to_f32(scale[0]), scale1 = f16_to_f32(scale[second]);
    for (int g = 0; g < group; ++g) {
      const float w = w0[g * kTileRows + t];
      bias[2 * g] += w * low0;
      bias[2 * g + 1] += w * low1;
      w0[g * kTileRows + t] = w * scale0;
      w1[g * kTileRows + t] = w * scale1;
    }
  }

  // Where the rows of a tile lie; they come from memory while the tile before is added up.
  void ask_for(const Entries::List& list, int64_t item, int64_t tile, Entry* found) const {
    const int64_t first = tile * kTileRows, last = std::min(first + kTileRows, int64_t{job.count[item]});
    const int32_t* index = job.index + item * job.max_entries;
    const int64_t bytes = entries.layout().v_stride;
    for (int64_t i = first; i < last; ++i) {
      const Entry e = *found++ = list.at(index[i]);
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(e.v + b, 0, 2);
      if (bytes % 64 != 0) __builtin_prefetch(e.v + bytes - 1, 0, 2);
    }
  }

  void compute(int worker, int64_t item, int64_t lo, int64_t hi, float* out) const {
    const bool quantised = is_quantised(job.source.elem);
    const SumKernel& kernel = table.weighted_sum[static_cast<int>(job.source.elem)];
    const size_t rows = static_cast<size_t>(group) * stride, tile = static_cast<size_t>(group) * kTileRows;
    auto* acc =
        reinterpret_cast<float*>(pool.scratch(worker).get(sizeof(float) * (rows + 2 * tile + 2 * group)));
    float *w0 = acc + rows, *w1 = w0 + tile, *bias = w1 + tile;
    std::memset(acc, 0, sizeof(float) * rows);
    std::memset(bias, 0, sizeof(float) * 2 * group);
    const Entries::List list(entries, item);
    Entry found[2][kTileRows];
    ask_for(list, item, lo, found[lo % 2]);
    for (int64_t j = lo; j < hi; ++j) {
      if (j + 1 < hi) ask_for(list, item, j + 1, found[(j + 1) % 2]);
      const int64_t first = j * kTileRows;
      const int n = static_cast<int>(std::min<int64_t>(kTileRows, job.count[item] - first));
      for (int g = 0; g < group; ++g) {
        std::memcpy(w0 + g * kTileRows, job.weights + (first_row(item) + g) * job.max_entries + first,
                    sizeof(float) * n);
      }
      const uint8_t* values[kTileRows];
      for (int t = 0; t < n; ++t) {
        const Entry& e = found[j % 2][t];
        values[t] = e.v;
        if (quantised) fold(e, t, w0, w1, bias);
      }
      kernel.tile(acc, stride, group, head_size, values, n, w0, quantised ? w1 : w0);
    }
    for (int g = 0; g < group; ++g) {
      float* row = out + int64_t{g} * head_size;
      kernel.end(acc + int64_t{g} * stride, row, head_size);
      for (int d = 0; quantised && d < head_size; ++d) row[d] += bias[2 * g + (2 * d >= head_size)];
    }
  }

  void whole(int worker, int64_t item, int64_t tiles, SplitPlan::Place) const {
    compute(worker, item, 0, tiles, job.out + first_row(item) * head_size);
  }
  void part(int worker, int64_t item, int64_t lo, int64_t hi, SplitPlan::Place, int64_t slot) const {
    compute(worker, item, lo, hi, partials.data() + slot * partial_size());
  }
  void merge(int, int64_t item, const std::vector<int64_t>& slots) const {
    float* out = job.out + first_row(item) * head_size;
    std::memset(out, 0, sizeof(float) * static_cast<size_t>(partial_size()));
    for (int64_t slot : slots) {
      const float* from = partials.data() + slot * partial_size();
      for (int64_t i = 0; i < partial_size(); ++i) out[i] += from[i];
    }
  }
};

}  // namespace

void weighted_sum(const WeightedSumJob& job, WorkerPool& pool) {
  thread_local SplitPlan plan;
  thread_local std::vector<float> partials;
  Work work(job, pool, partials);
  const int64_t items = int64_t{job.seqs} * job.source.kv_heads;
  plan.build(items, pool.size(), 2, [&](int64_t item) {
    const int64_t n = job.count[item];
    if (n < 0 || n > job.max_entries) {
      throw Refusal("A list claims " + std::to_string(n) + " entries where it holds " +
                        std::to_string(job.max_entries) + ".",
                    "count must lie between 0 and the last dimension of index.");
    }
    return (n + kTileRows - 1) / kTileRows;
  });
  partials.resize(static_cast<size_t>(plan.slots() * work.partial_size()));
  for (int64_t item = 0; item < items; ++item) {
    if (plan.tiles(item) != 0) continue;
    std::memset(job.out + work.first_row(item) * work.head_size, 0,
                sizeof(float) * static_cast<size_t>(work.partial_size()));
  }
  plan.run(pool, work);
}

}  // namespace coattn
