// acc[g] = alpha[g] * acc[g] + sum over t of weight[g][t] * row[t], each row read once for MG queries.
namespace coattn::COATTN_ISA {
namespace {

// Weights of one query lie kTile apart from the next. Lanes of the first half of a pair take w0, of the
// second w1: they differ for int4 values, whose two halves of channels have scales of their own.
struct Weights {
  const float* w0;
  const float* w1;
};

template <Elem E, int MG, int NC, bool Tail, class Rows>
inline void accumulate_block(float* acc, int acc_stride, const float* alpha, int head_size, const Rows& rows,
                             int n, Weights w, int c0, Ahead& ahead) {
  constexpr bool two = E == Elem::int4;
  vf sum[MG][NC][2];
  for (int g = 0; g < MG; ++g) {
    const vf factor = vset(alpha[g]);
    for (int c = 0; c < NC; ++c) {
      sum[g][c][0] = vmul(factor, vload(acc + g * acc_stride + (c0 + c) * 2 * W));
      sum[g][c][1] = vmul(factor, vload(acc + g * acc_stride + (c0 + c) * 2 * W + W));
    }
  }
  for (int t = 0; t < n; ++t) {
    const uint8_t* row = rows[t] + c0 * kPairBytes<E>;
    vf v[NC][2];
    for (int c = 0; c < NC; ++c) {
      load_pair<E, Tail>(row + c * kPairBytes<E>, tail_size<E>(head_size), v[c][0], v[c][1]);
    }
    for (int g = 0; g < MG; ++g) {
      const vf w0 = vset(w.w0[g * kTile + t]);
      const vf w1 = two ? vset(w.w1[g * kTile + t]) : w0;
      for (int c = 0; c < NC; ++c) {
        sum[g][c][0] = vfma(w0, v[c][0], sum[g][c][0]);
        sum[g][c][1] = vfma(w1, v[c][1], sum[g][c][1]);
      }
    }
    if constexpr (NC * kPairBytes<E> >= 64) {
      ahead.step<NC * kPairBytes<E> / 64>();
    } else {
      if (t % (64 / (NC * kPairBytes<E>)) == 0) ahead.step<1>();
    }
  }
  for (int g = 0; g < MG; ++g) {
    for (int c = 0; c < NC; ++c) {
      vstore(acc + g * acc_stride + (c0 + c) * 2 * W, sum[g][c][0]);
      vstore(acc + g * acc_stride + (c0 + c) * 2 * W + W, sum[g][c][1]);
    }
  }
}

template <Elem E, int MG, class Rows>
inline void accumulate_queries(float* acc, int acc_stride, const float* alpha, int head_size,
                               const Rows& rows, int n, Weights w, Ahead& ahead) {
  // Enough sums in flight to cover the latency of an FMA, few enough to stay in registers beside values and
  // weights.
  constexpr int NC = MG == 1 || 10 * MG + 8 <= kRegisters ? 4 : 4 * MG + 6 <= kRegisters ? 2 : 1;
  const int full = full_pairs<E>(head_size);
  int c = 0;
  for (; c + NC <= full; c += NC) {
    accumulate_block<E, MG, NC, false>(acc, acc_stride, alpha, head_size, rows, n, w, c, ahead);
  }
  if constexpr (NC > 2) {
    for (; c + 2 <= full; c += 2) {
      accumulate_block<E, MG, 2, false>(acc, acc_stride, alpha, head_size, rows, n, w, c, ahead);
    }
  }
  for (; c < full; ++c) {
    accumulate_block<E, MG, 1, false>(acc, acc_stride, alpha, head_size, rows, n, w, c, ahead);
  }
  if (head_size % (2 * W)) {
    accumulate_block<E, MG, 1, true>(acc, acc_stride, alpha, head_size, rows, n, w, c, ahead);
  }
}

template <Elem E, class Rows>
void accumulate_tile(float* acc, int acc_stride, const float* alpha, int group, int head_size,
                     const Rows& rows, int n, Weights w, Ahead& ahead) {
  auto call = [&]<int MG>(int g) {
    accumulate_queries<E, MG>(acc + g * acc_stride, acc_stride, alpha + g, head_size, rows, n,
                              {w.w0 + g * kTile, w.w1 + g * kTile}, ahead);
  };
  int g = 0;
  for (; g + kMaxMG <= group; g += kMaxMG) call.template operator()<kMaxMG>(g);
  switch (group - g) {
    case 1:
      call.template operator()<1>(g);
      break;
    case 2:
      call.template operator()<2>(g);
      break;
    case 3:
      call.template operator()<3>(g);
      break;
    default:
      break;
  }
  if constexpr (kMaxMG > 4) {
    switch (group - g) {
      case 4:
        call.template operator()<4>(g);
        break;
      case 5:
        call.template operator()<5>(g);
        break;
      case 6:
        call.template operator()<6>(g);
        break;
      case 7:
        call.template operator()<7>(g);
        break;
      default:
        break;
    }
  }
}

}  // namespace
}  // namespace coattn::COATTN_ISA
