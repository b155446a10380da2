// AVX-512 kernels: float32 arithmetic, VNNI for int8 keys and values.
#include "kernels/table.h"

#define COATTN_ISA avx512
#include "isa/vec_avx512.h"
#include "isa/kernels.inl"
#include "isa/avx512_dot.inl"
#include "isa/avx512_sum.inl"

namespace coattn {

const Kernels& avx512_kernels() {
  static const Kernels table = [] {
    Kernels t = avx512::make_table("avx512");
    for (int bf16_query = 0; bf16_query < 2; ++bf16_query) {
      t.attend[static_cast<int>(Elem::int8)][bf16_query] =
          avx512::attend_kernel<Elem::int8, avx512::VnniDot, avx512::VnniSum>("avx512 vnni");
    }
    return t;
  }();
  return table;
}

}  // namespace coattn
