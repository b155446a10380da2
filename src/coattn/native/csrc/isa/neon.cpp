// NEON kernels, for 64-bit ARM.
#include "kernels/table.h"

#define COATTN_ISA neon
#define COATTN_DOT "isa/neon_dot.inl"
#include "isa/vec_neon.h"
#include "isa/kernels.inl"

namespace coattn {

const Kernels& neon_kernels() {
  static const Kernels table = neon::make_table("neon");
  return table;
}

}  // namespace coattn
