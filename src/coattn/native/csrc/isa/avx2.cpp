// AVX2 + FMA + F16C kernels.
#include "kernels/table.h"

#define COATTN_ISA avx2
#include "isa/vec_avx2.h"
#include "isa/kernels.inl"

namespace coattn {

const Kernels& avx2_kernels() {
  static const Kernels table = avx2::make_table("avx2");
  return table;
}

}  // namespace coattn
