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
AttendKernel table_of(const char* name) {
  return {name, Kernel::begin, Kernel::tile, Kernel::end};
}

}  // namespace

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels t = avx512_kernels();
    t.isa = "amx";
    const int bf16 = static_cast<int>(Elem::bf16);
    t.large_attend[bf16][1] = table_of<amx::Bf16>("amx bf16");
    t.large_group[bf16] = 2;
    for (int q = 0; q < 2; ++q) {
      t.large_attend[static_cast<int>(Elem::int8)][q] = table_of<amx::Int<Elem::int8>>("amx int8");
      t.large_attend[static_cast<int>(Elem::int4)][q] = table_of<amx::Int<Elem::int4>>("amx int8");
    }
    t.large_group[static_cast<int>(Elem::int8)] = t.large_group[static_cast<int>(Elem::int4)] = 2;
    return t;
  }();
  return table;
}

}  // namespace coattn
