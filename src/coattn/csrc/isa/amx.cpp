// AVX-512's kernels with AMX tiles where they measure faster.
#include "kernels/table.h"

#define COATTN_ISA avx512
#include "isa/vec_avx512.h"
#include "isa/math.inl"
#include "isa/rows.inl"
#include "isa/amx_tiles.inl"
#include "isa/amx_bf16.inl"
#include "isa/amx_int.inl"

namespace coattn {
namespace {

template <class Kernel>
AttendKernel kernel_of(const char* name) {
  return {name, Kernel::begin, Kernel::tile, Kernel::end};
}

}  // namespace

// From this many queries per KV head on. Measured on one Emerald Rapids core shared with other work, head
// size 128, block 32, ns a block in the L2 cache, AVX-512 / AMX:
//
//   queries      2            4             5             8             16
//   bf16         414 / 559    724 / 578     908 / 567     1408 / 525    2575 / 847
//   int8         619 / 751    1026 / 839    1262 / 933    2117 / 1037   3880 / 1917
//   int4         610 / 928    1024 / 1022   1295 / 1128   2054 / 1236   3998 / 2149
//
// From DRAM four queries are no faster with tiles (bf16: 1341 / 1467), which is why the border lies above
// them.
constexpr int kLargeGroup = 5;

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels t = avx512_kernels();
    t.isa = "amx";
    t.large_attend[static_cast<int>(Elem::bf16)][1] = kernel_of<amx::Bf16>("amx bf16");
    for (int q = 0; q < 2; ++q) {
      t.large_attend[static_cast<int>(Elem::int8)][q] = kernel_of<amx::Int<Elem::int8>>("amx int8");
      t.large_attend[static_cast<int>(Elem::int4)][q] = kernel_of<amx::Int<Elem::int4>>("amx int4");
    }
    t.large_group = kLargeGroup;
    // Each half of an int4 head fills a tile row of 64 channels only from here on; below, AVX-512 was faster.
    t.large_head[static_cast<int>(Elem::int4)] = 128;
    return t;
  }();
  return table;
}

}  // namespace coattn
