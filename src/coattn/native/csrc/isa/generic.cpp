// The portable kernels: any CPU, any compiler with GNU vector extensions.
#include "kernels/table.h"

#define COATTN_ISA generic
#include "isa/vec_generic.h"
#include "isa/kernels.inl"

namespace coattn {

const Kernels& generic_kernels() {
  static const Kernels table = generic::make_table("generic");
  return table;
}

}  // namespace coattn
