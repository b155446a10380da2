// dot.inl for NEON: the same sums in the same order, with loops that are unrolled before GCC sees them. GCC 12
// keeps an array of vectors in memory where loops run over it, and stores eight sums with every step.
#include <type_traits>

namespace coattn::COATTN_ISA {
namespace {

constexpr int kTile = 64;  // rows per tile, and the distance between two queries' score rows

// f(0), f(1) .. f(N - 1), with indices that are constants.
template <int N, int I = 0, class F>
[[gnu::always_inline]] inline void each(const F& f) {
  f(std::integral_constant<int, I>{});
  if constexpr (I + 1 < N) each<N, I + 1>(f);
}

// q: [MG][padded] in pair order. out[g * kTile + t] = q[g] . row[t0 + t]; rows past n repeat row n - 1.
template <Elem E, int MG>
[[gnu::always_inline]] inline void dot_block(const float* q, int q_stride, int head_size, const Strided& rows,
                                             int t0, int n, Ahead& ahead, float* out) {
  constexpr int MT = kAccs / MG;
  const uint8_t* row[MT];
  each<MT>([&](auto t) { row[t] = rows[t0 + t < n ? t0 + t : n - 1]; });
  vf acc[kAccs];
  each<kAccs>([&](auto i) { acc[i] = vzero(); });
  const int full = full_pairs<E>(head_size);
  auto step = [&]<bool Tail>(int c) {
    each<MT>([&](auto t) {
      vf a, b;
      load_pair<E, Tail>(row[t] + c * kPairBytes<E>, tail_size<E>(head_size), a, b);
      const float* qc = q + c * 2 * W;
      each<MG>([&](auto g) { acc[g * MT + t] = vfma(a, vload(qc + g * q_stride), acc[g * MT + t]); });
      each<MG>([&](auto g) { acc[g * MT + t] = vfma(b, vload(qc + g * q_stride + W), acc[g * MT + t]); });
    });
    ahead.step<(MT * kPairBytes<E> + 63) / 64>();
  };
  for (int c = 0; c < full; ++c) step.template operator()<false>(c);
  if (head_size % (2 * W)) step.template operator()<true>(full);
  alignas(64) float sums[kAccs];
  each<kAccs / W>([&](auto i) { vstore(sums + W * i, vreduce(acc + W * i)); });
  each<MG>([&](auto g) { each<MT>([&](auto t) { out[g * kTile + t0 + t] = sums[g * MT + t]; }); });
}

template <Elem E, int MG>
void dot_queries(const float* q, int q_stride, int head_size, const Strided& rows, int n, Ahead& ahead,
                 float* out) {
  Ahead mine = ahead;  // in registers
  for (int t0 = 0; t0 < n; t0 += kAccs / MG) dot_block<E, MG>(q, q_stride, head_size, rows, t0, n, mine, out);
  ahead = mine;
}

// out[g * kTile + t] for `group` queries and n <= kTile rows. Prefetching happens with the first queries
// only.
template <Elem E>
void dot_tile(const float* q, int q_stride, int group, int head_size, const Strided& rows, int n,
              Ahead& ahead, float* out) {
  int g = 0;
  for (; g + 4 <= group; g += 4) {
    dot_queries<E, 4>(q + g * q_stride, q_stride, head_size, rows, n, ahead, out + g * kTile);
  }
  if (group & 2) {
    dot_queries<E, 2>(q + g * q_stride, q_stride, head_size, rows, n, ahead, out + g * kTile);
    g += 2;
  }
  if (group & 1) dot_queries<E, 1>(q + g * q_stride, q_stride, head_size, rows, n, ahead, out + g * kTile);
}

}  // namespace
}  // namespace coattn::COATTN_ISA
