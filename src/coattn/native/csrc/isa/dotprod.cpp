// NEON's kernels with those for int8 that multiply bytes (SDOT, an option of ARMv8.2).
#include "kernels/table.h"

#define COATTN_ISA neon
#include "isa/vec_neon.h"
#include "isa/math.inl"
#include "isa/rows.inl"
#include "isa/neon_dot.inl"
#include "isa/accumulate.inl"
#include "isa/softmax.inl"
#include "isa/attend.inl"
#include "isa/neon_int.inl"

namespace coattn {

const Kernels& dotprod_kernels() {
  static const Kernels table = [] {
    Kernels t = neon_kernels();
    t.isa = "dotprod";
    for (int bf16_query = 0; bf16_query < 2; ++bf16_query) {
      t.attend[static_cast<int>(Elem::int8)][bf16_query] =
          neon::attend_kernel<Elem::int8, neon::SdotDot, neon::SdotSum>("neon dotprod");
    }
    return t;
  }();
  return table;
}

}  // namespace coattn
