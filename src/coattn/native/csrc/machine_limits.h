// What the machine can do at most, measured on the same pool as the kernels: the figures printed beside
// theirs.
#pragma once

#include <cstdint>
#include <vector>

namespace coattn {

// GB/s of reading `bytes` once, each thread one contiguous share. Best of `repeats`.
double stream_read_gbps(int threads, int64_t bytes, int repeats);

// GB/s of reading all blocks of `bytes` once in random order, the next block prefetched. Best of `repeats`.
double random_gather_gbps(int threads, int64_t block_bytes, int64_t bytes, int repeats);

// The pieces that attend reads over a block table: of each list and KV head, its blocks in their order.
struct GatherPieces {
  const uint8_t* base;  // piece of block b and head h at base + b * block_stride + h * head_stride
  int64_t block_stride, head_stride, num_blocks, bytes;
  int heads;
  const int32_t* table;  // [lists, blocks]
  int64_t lists, blocks;
};

// GB/s of reading them once and doing nothing with them. Best of `repeats`.
double gather_gbps(int threads, const GatherPieces& pieces, int repeats);

// Nanoseconds from the call of a job in which every worker spins for `us` microseconds to its return, n times.
std::vector<int64_t> job_latency(int threads, int n, double us);

// Every thread looks at the clock for `seconds` and does nothing else: the nanoseconds of each time it stood
// still for `least_us` or more. What a job cannot avoid on this machine, whoever caused it.
std::vector<int64_t> spin_gaps(int threads, double seconds, double least_us);

}  // namespace coattn
