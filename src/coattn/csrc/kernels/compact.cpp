#include "kernels/compact.h"

#include "dispatch.h"

namespace coattn {

void compact(const CompactJob& job, WorkerPool& pool) {
  const Entries entries(job.source);
  const BlockLayout& layout = entries.layout();
  const Kernels& table = kernels();
  const int64_t kv_heads = job.source.kv_heads, size = job.source.head_size;
  const int64_t total = int64_t{job.seqs} * kv_heads * job.max_entries;
  pool.parallel_for(total, 64, [&](int worker, int64_t lo, int64_t hi) {
    auto* k =
        reinterpret_cast<float*>(pool.scratch(worker).get(sizeof(float) * 2 * static_cast<size_t>(size)));
    float* v = k + size;
    for (int64_t i = lo; i < hi; ++i) {
      const int64_t item = i / job.max_entries, at = i % job.max_entries, count = job.count[item];
      if (count < 0 || count > job.max_entries) {
        throw Refusal("A list claims " + std::to_string(count) + " entries where it holds " +
                          std::to_string(job.max_entries) + ".",
                      "count must lie between 0 and the last dimension of index.");
      }
      if (at >= count) {
        i += job.max_entries - at - 1;
        continue;
      }
      const Entry e = entries.at(item, job.index[i]);
      uint8_t* k_to = job.k_out + item / kv_heads * job.k_seq + item % kv_heads * job.k_head + at * job.k_row;
      uint8_t* v_to = job.v_out + item / kv_heads * job.v_seq + item % kv_heads * job.v_head + at * job.v_row;
      if (is_quantised(job.source.elem)) {
        table.read_row(layout, e.block, e.row, k, v);
        table.convert(Elem::f32, k, job.out_elem, k_to, size);
        table.convert(Elem::f32, v, job.out_elem, v_to, size);
      } else {
        table.convert(job.source.elem, e.k, job.out_elem, k_to, size);
        table.convert(job.source.elem, e.v, job.out_elem, v_to, size);
      }
    }
  });
}

}  // namespace coattn
