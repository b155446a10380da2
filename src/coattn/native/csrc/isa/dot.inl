// Scores of a few queries against a few rows: kAccs independent sums, each row read once for MG queries.
namespace coattn::COATTN_ISA {
namespace {

constexpr int kTile = 64;  // rows per tile, and the distance between two queries' score rows

// q: [MG][padded] in pair order. out[g * kTile + t] = q[g] . row[t0 + t]; rows past n repeat row n - 1.
template <Elem E, int MG>
inline void dot_block(const float* q, int q_stride, int head_size, const Strided& rows, int t0, int n,
                      Ahead& ahead, float* out) {
  constexpr int MT = kAccs / MG;
  const uint8_t* row[MT];
  for (int t = 0; t < MT; ++t) row[t] = rows[t0 + t < n ? t0 + t : n - 1];
  vf acc[kAccs];
  for (int i = 0; i < kAccs; ++i) acc[i] = vzero();
  const int full = full_pairs<E>(head_size);
  auto step = [&]<bool Tail>(int c) {
    for (int t = 0; t < MT; ++t) {
      vf a, b;
      load_pair<E, Tail>(row[t] + c * kPairBytes<E>, tail_size<E>(head_size), a, b);
      for (int g = 0; g < MG; ++g) {
        const float* qc = q + g * q_stride + c * 2 * W;
        acc[g * MT + t] = vfma(a, vload(qc), acc[g * MT + t]);
        acc[g * MT + t] = vfma(b, vload(qc + W), acc[g * MT + t]);
      }
    }
    ahead.step<(MT * kPairBytes<E> + 63) / 64>();
  };
  for (int c = 0; c < full; ++c) step.template operator()<false>(c);
  if (head_size % (2 * W)) step.template operator()<true>(full);
  alignas(64) float sums[kAccs];
  for (int i = 0; i < kAccs; i += W) vstore(sums + i, vreduce(acc + i));
  for (int g = 0; g < MG; ++g) {
    for (int t = 0; t < MT; ++t) out[g * kTile + t0 + t] = sums[g * MT + t];
  }
}

template <Elem E, int MG>
inline void dot_queries(const float* q, int q_stride, int head_size, const Strided& rows, int n, Ahead& ahead,
                        float* out) {
  for (int t0 = 0; t0 < n; t0 += kAccs / MG)
    dot_block<E, MG>(q, q_stride, head_size, rows, t0, n, ahead, out);
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
