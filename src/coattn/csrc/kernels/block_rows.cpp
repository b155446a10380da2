#include "kernels/block_rows.h"

#include <algorithm>
#include <string>

#include "block_layout.h"
#include "dispatch.h"
#include "errors.h"

namespace coattn {
namespace {

uint8_t* block_at(const BlockRowsJob& job, int64_t id, int64_t head) {
  if (id < 0 || id >= job.num_blocks) {
    throw Refusal(
        "Block " + std::to_string(id) + " is not one of the arena's " + std::to_string(job.num_blocks) + ".",
        "Only blocks that the arena handed out can be written or read.");
  }
  return job.base + id * job.block_stride + head * job.head_stride;
}

uint8_t* row_at(void* rows, Elem elem, int64_t offset) {
  return static_cast<uint8_t*>(rows) + elem_bytes(elem, offset);
}

void check_blocks(const BlockRowsJob& job) {
  if (job.tokens > job.block_count * job.block || job.tokens <= (job.block_count - 1) * job.block) {
    throw Refusal(std::to_string(job.tokens) + " tokens do not fill " + std::to_string(job.block_count) +
                      " blocks of " + std::to_string(job.block) + ".",
                  "Pass exactly the blocks that the tokens need.");
  }
}

// body(block index, head, first token, tokens in the block)
template <class Body>
void for_blocks(const BlockRowsJob& job, WorkerPool& pool, Body&& body) {
  check_blocks(job);
  const int64_t total = job.block_count * job.kv_heads;
  pool.parallel_for(total, 4, [&](int worker, int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      const int64_t first = i / job.kv_heads * job.block;
      body(worker, block_at(job, job.blocks[i / job.kv_heads], i % job.kv_heads), i % job.kv_heads, first,
           static_cast<int>(std::min<int64_t>(job.block, job.tokens - first)));
    }
  });
}

}  // namespace

void write_rows(const BlockRowsJob& job, WorkerPool& pool) {
  if (is_quantised(job.elem)) {
    throw Refusal(std::string("Single rows cannot be written into ") + elem_name(job.elem) + " blocks.",
                  "Collect a block of rows and use write_blocks.");
  }
  const BlockLayout layout = block_layout(job.elem, job.block, job.head_size);
  const Kernels& table = kernels();
  const int64_t total = job.tokens * job.kv_heads;
  pool.parallel_for(total, 32, [&](int, int64_t lo, int64_t hi) {
    for (int64_t i = lo; i < hi; ++i) {
      const int64_t token = i / job.kv_heads, head = i % job.kv_heads, slot = job.slots[token];
      uint8_t* block = block_at(job, slot < 0 ? -1 : slot / job.block, head);
      const int64_t row = slot % job.block * layout.row_bytes;
      table.convert(job.row_elem, row_at(job.k, job.row_elem, token * job.k_token + head * job.k_head),
                    job.elem, block + layout.k + row, job.head_size);
      table.convert(job.row_elem, row_at(job.v, job.row_elem, token * job.v_token + head * job.v_head),
                    job.elem, block + layout.v + row, job.head_size);
    }
  });
}

void write_blocks(const BlockRowsJob& job, WorkerPool& pool) {
  const BlockLayout layout = block_layout(job.elem, job.block, job.head_size);
  const Kernels& table = kernels();
  const int64_t size = job.head_size;
  for_blocks(job, pool, [&](int worker, uint8_t* block, int64_t head, int64_t first, int n) {
    const bool quantised = is_quantised(job.elem);
    float* k = nullptr;
    if (quantised) {
      k = reinterpret_cast<float*>(
          pool.scratch(worker).get(sizeof(float) * 2 * static_cast<size_t>(job.block * size)));
    }
    float* v = k + (quantised ? job.block * size : 0);
    for (int t = 0; t < n; ++t) {
      const void* k_row = row_at(job.k, job.row_elem, (first + t) * job.k_token + head * job.k_head);
      const void* v_row = row_at(job.v, job.row_elem, (first + t) * job.v_token + head * job.v_head);
      if (quantised) {
        table.convert(job.row_elem, k_row, Elem::f32, k + t * size, size);
        table.convert(job.row_elem, v_row, Elem::f32, v + t * size, size);
      } else {
        table.convert(job.row_elem, k_row, job.elem, block + layout.k + t * layout.row_bytes, size);
        table.convert(job.row_elem, v_row, job.elem, block + layout.v + t * layout.row_bytes, size);
      }
    }
    if (quantised) table.quantise(layout, k, v, n, block);
  });
}

void read_blocks(const BlockRowsJob& job, WorkerPool& pool) {
  const BlockLayout layout = block_layout(job.elem, job.block, job.head_size);
  const Kernels& table = kernels();
  const int64_t size = job.head_size;
  for_blocks(job, pool, [&](int worker, uint8_t* block, int64_t head, int64_t first, int n) {
    auto* k =
        reinterpret_cast<float*>(pool.scratch(worker).get(sizeof(float) * 2 * static_cast<size_t>(size)));
    for (int t = 0; t < n; ++t) {
      table.read_row(layout, block, t, k, k + size);
      table.convert(Elem::f32, k, job.row_elem,
                    row_at(job.k, job.row_elem, (first + t) * job.k_token + head * job.k_head), size);
      table.convert(Elem::f32, k + size, job.row_elem,
                    row_at(job.v, job.row_elem, (first + t) * job.v_token + head * job.v_head), size);
    }
  });
}

}  // namespace coattn
