// Everything an instruction set's translation unit compiles, given COATTN_ISA and its isa/vec_*.h. The order
// matters.
#include "isa/math.inl"
#include "isa/rows.inl"
#ifdef COATTN_DOT
#include COATTN_DOT
#else
#include "isa/dot.inl"
#endif
#include "isa/accumulate.inl"
#include "isa/softmax.inl"
#include "isa/attend.inl"
#include "isa/convert.inl"
#include "isa/gathered.inl"

namespace coattn::COATTN_ISA {
namespace {

static_assert(kTile == kTileRows);

template <Elem E>
void add_element(Kernels& t, const char* isa) {
  constexpr int e = static_cast<int>(E);
  if constexpr (E != Elem::int4) t.attend[e][0] = t.attend[e][1] = attend_kernel<E, FloatDot<E>>(isa);
  t.weighted_sum[e] = {sum_tile<E>, from_pair_order<E>};
}

Kernels make_table(const char* isa) {
  Kernels t{};
  t.isa = isa;
  add_element<Elem::f32>(t, isa);
  add_element<Elem::bf16>(t, isa);
  add_element<Elem::f16>(t, isa);
  add_element<Elem::int8>(t, isa);
  add_element<Elem::int4>(t, isa);
  t.read = read;
  t.exp_minus = exp_minus;
  t.widen = widen;
  t.quantise = quantise;
  t.read_row = read_row;
  t.rows = {key_range, held_keys, widen_keys, encode_keys, encode_values};
  return t;
}

}  // namespace
}  // namespace coattn::COATTN_ISA
