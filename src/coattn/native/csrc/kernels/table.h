// The kernels of one instruction set. dispatch.h chooses a table once; everything above works through it.
#pragma once

#include "block_layout.h"
#include "kernels/attend_kernel.h"

namespace coattn {

// Weighted sums of value rows anywhere in memory.
struct SumKernel {
  // acc [group][stride] += w * row; weights of two queries lie kTileRows apart, w1 is for the upper half of
  // int4 rows.
  void (*tile)(float* acc, int stride, int group, int head_size, const uint8_t* const* rows, int n,
               const float* w0, const float* w1);
  void (*end)(const float* acc, float* natural, int head_size);
};

// Rows into int8 blocks that have others already. Ranges are [head_size] lowest and highest keys of each
// channel; +inf and -inf where there are none.
struct RowsKernel {
  // Of n rows [n][size].
  void (*range)(const float* k, int n, int size, float* low, float* high);
  // What a block's scales hold.
  void (*held)(const BlockLayout& layout, const uint8_t* block, float* low, float* high);
  // Makes a block's scales hold a range, besides what they hold; channels that hold it within half a step
  // stay as they are. Whether any did not; only_ask: and none is changed.
  bool (*widen)(const BlockLayout& layout, const float* low, const float* high, bool only_ask,
                uint8_t* block);
  // Rows first..first + n of a block, keys by the scales that it has.
  void (*keys)(const BlockLayout& layout, const float* k, int first, int n, uint8_t* block);
  void (*values)(const BlockLayout& layout, const float* v, int first, int n, uint8_t* block);
};

struct Kernels {
  const char* isa;
  AttendKernel attend[kElems][2];  // [element of the blocks, not int4][query is bf16]
  // Used instead for groups of at least large_group queries, where there is one (tile not null).
  AttendKernel large_attend[kElems][2];
  int large_group;
  SumKernel weighted_sum[kElems];
  // Reads every byte (a multiple of 64 of them) and, where next is not null, prefetches as many from there.
  void (*read)(const uint8_t* p, int64_t bytes, const uint8_t* next);
  // row[i] = exp(row[i] - shift), for shift >= every row[i].
  void (*exp_minus)(float* row, int64_t n, float shift);
  // n elements of a float type as float32.
  void (*widen)(Elem from, const void* src, float* dst, int64_t n);
  // Rows [n][head_size] of one head into an int8 block. Rows n.. of the block keep their old codes.
  void (*quantise)(const BlockLayout& layout, const float* k, const float* v, int n, uint8_t* block);
  // One row of an int8 block as floats; where v is null, its key alone.
  void (*read_row)(const BlockLayout& layout, const uint8_t* block, int row, float* k, float* v);
  RowsKernel rows;
};

const Kernels& generic_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
// AVX-512's table with AMX kernels where they measure faster; see isa/amx.cpp.
const Kernels& amx_kernels();
#elif defined(__aarch64__)
const Kernels& neon_kernels();
// NEON's table with SDOT kernels for int8; see isa/dotprod.cpp.
const Kernels& dotprod_kernels();
#endif

}  // namespace coattn
