#include "kernels/score_digest.h"

#include <algorithm>
#include <limits>
#include <string>

#include "dispatch.h"
#include "errors.h"

namespace coattn {
namespace {

// max(q * min, q * max) is q * max for q > 0 and q * min for q < 0, so the bound is a plain dot product of
// [min(q, 0) | max(q, 0)] with the row [min | max]: the same inner loop as attention scores.
void prepare(const ScoreDigestJob& job, const Kernels& table, const ScoreKernel& kernel, int64_t seq,
             int64_t head, float* natural, float* prepared) {
  const auto* q =
      static_cast<const uint8_t*>(job.q) + elem_bytes(job.q_elem, seq * job.q_seq + head * job.q_head);
  table.convert(job.q_elem, q, Elem::f32, natural, job.head_size);
  if (job.two_sided) {
    for (int d = 0; d < job.head_size; ++d) {
      const float x = natural[d];
      natural[d] = x < 0 ? x : 0;
      natural[job.head_size + d] = x < 0 ? 0 : x;
    }
  }
  kernel.prepare(natural, prepared, job.two_sided ? 2 * job.head_size : job.head_size);
}

}  // namespace

void score_digest(const ScoreDigestJob& job, WorkerPool& pool) {
  const int group = job.q_heads / job.kv_heads, width = job.two_sided ? 2 * job.head_size : job.head_size;
  const int stride = (width + 31) / 32 * 32;
  const int64_t tiles = (job.max_blocks + kTileRows - 1) / kTileRows;
  const int64_t total = int64_t{job.seqs} * job.kv_heads * tiles;
  const Kernels& table = kernels();
  const ScoreKernel& kernel = table.score[static_cast<int>(job.elem)];
  pool.parallel_for(total, 4, [&](int worker, int64_t lo, int64_t hi) {
    const size_t rows = static_cast<size_t>(group) * stride;
    auto* prepared = reinterpret_cast<float*>(pool.scratch(worker).get(
        sizeof(float) * (rows + size_t{2} * job.head_size + size_t{kTileRows} * group)));
    float *natural = prepared + rows, *scores = natural + 2 * job.head_size;
    int64_t ready = -1;
    for (int64_t i = lo; i < hi; ++i) {
      const int64_t item = i / tiles, seq = item / job.kv_heads, head = item % job.kv_heads,
                    first = i % tiles * kTileRows;
      const int64_t list = job.table_heads == 1 ? seq : item, count = job.count[list];
      if (count < 0 || count > job.max_blocks) {
        throw Refusal("A list claims " + std::to_string(count) + " blocks where its table holds " +
                          std::to_string(job.max_blocks) + ".",
                      "count must lie between 0 and max_blocks.");
      }
      if (ready != item) {
        for (int g = 0; g < group; ++g) {
          prepare(job, table, kernel, seq, head * group + g, natural, prepared + int64_t{g} * stride);
        }
        ready = item;
      }
      const int64_t end = std::min(first + kTileRows, job.max_blocks);
      const int n = static_cast<int>(std::clamp<int64_t>(count - first, 0, kTileRows));
      const uint8_t* digest[kTileRows];
      for (int t = 0; t < n; ++t) {
        const int32_t id = job.table[list * job.max_blocks + first + t];
        if (id < 0 || id >= job.num_blocks) {
          throw Refusal(
              "Block " + std::to_string(id) + " has no digest among " + std::to_string(job.num_blocks) + ".",
              "A block table may only name blocks that exist.");
        }
        digest[t] = job.base + id * job.block_stride + head * job.head_stride;
      }
      if (n > 0) kernel.tile(prepared, stride, group, width, digest, n, scores);
      for (int g = 0; g < group; ++g) {
        float* out = job.out + (seq * job.q_heads + head * group + g) * job.max_blocks + first;
        for (int t = 0; t < n; ++t) out[t] = scores[g * kTileRows + t] * job.scale;
        std::fill(out + n, out + (end - first), -std::numeric_limits<float>::infinity());
      }
    }
  });
}

}  // namespace coattn
