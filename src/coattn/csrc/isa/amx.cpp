// AVX-512's kernels with AMX tiles where they measure faster.
#include "kernels/table.h"

#define COATTN_ISA avx512
#include "isa/vec_avx512.h"

#include "isa/math.inl"
#include "isa/rows.inl"

#include "isa/amx_tiles.inl"

#include "isa/amx_bf16.inl"

namespace coattn {

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels t = avx512_kernels();
    t.isa = "amx";
    const int bf16 = static_cast<int>(Elem::bf16);
    t.large_attend[bf16][1] = {"amx bf16", amx::Bf16::begin, amx::Bf16::tile, amx::Bf16::end};
    t.large_group[bf16] = 2;
    return t;
  }();
  return table;
}

}  // namespace coattn
