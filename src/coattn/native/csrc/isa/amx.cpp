// AVX-512's kernels with AMX tiles where they measure faster.
#include "kernels/table.h"

#define COATTN_ISA avx512
#include "isa/vec_avx512.h"
#include "isa/math.inl"
#include "isa/rows.inl"
#include "isa/amx_tiles.inl"
#include "isa/amx_softmax.inl"
#include "isa/amx_bf16.inl"
#include "isa/amx_int_query.inl"
#include "isa/amx_int_values.inl"
#include "isa/amx_int.inl"

namespace coattn {
namespace {

template <class Kernel>
AttendKernel kernel_of(const char* name) {
  return {name, Kernel::begin, Kernel::tile, Kernel::end};
}

}  // namespace

// From this many queries per KV head on. Measured on one Emerald Rapids core, block 32, ns a block from the
// L2 cache and from DRAM, AVX-512 / AMX:
//
//   head 128        2            3            4             8
//   bf16, cache     492 / 570    703 / 570    801 / 578     1434 / 621
//   bf16, DRAM      1088 / 1307  1444 / 1290  1456 / 1432   2064 / 1447
//   int8, cache     613 / 615    818 / 621    1018 / 639    1860 / 683
//   int8, DRAM      881 / 829    1136 / 801   1412 / 925    2302 / 990
constexpr int kLargeGroup = 3;

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels t = avx512_kernels();
    t.isa = "amx";
    t.large_attend[static_cast<int>(Elem::bf16)][1] = kernel_of<amx::Bf16>("amx bf16");
    for (int q = 0; q < 2; ++q) {
      t.large_attend[static_cast<int>(Elem::int8)][q] = kernel_of<amx::Int8>("amx int8");
    }
    t.large_group = kLargeGroup;
    return t;
  }();
  return table;
}

}  // namespace coattn
