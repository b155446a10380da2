// The online softmax of a few queries over kStep tokens, several tokens a vector. In powers of two: scores
// come times log2(e), and so does the maximum.
namespace coattn::amx {
namespace {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

inline vf swap_halves(vf x) {
  return _mm512_shuffle_f32x4(x, x, 0x4e);
}

// Which token a slot of vector t holds: 8 queries and two slots, the halves of a step side by side.
struct Halves {
  static constexpr int kQueries = 8;
  static constexpr int token(int t, int slot) { return t + 16 * slot; }
};

template <class Order>
struct Lanes {
  static constexpr int kQueries = Order::kQueries, kSlots = 16 / kQueries;
  static_assert(kQueries == 4 || kQueries == 8);

  // One number a query, in every slot.
  static vf spread(const float* p) {
    if constexpr (kQueries == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
    return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
  }
  static void keep(float* p, vf x) {
    if constexpr (kQueries == 8) {
      _mm256_storeu_ps(p, _mm512_castps512_ps256(x));
    } else {
      _mm_storeu_ps(p, _mm512_castps512_ps128(x));
    }
  }
  static vf max(vf x) {
    x = vmax(x, swap_halves(x));
    return kQueries == 8 ? x : vmax(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  }
  static vf sum(vf x) {
    x = vadd(x, swap_halves(x));
    return kQueries == 8 ? x : vadd(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  }
  // The lanes of vector t whose token is one of the first n.
  static __mmask16 first(int t, int n) {
    int lanes = 0;
    for (int i = 0; i < kSlots; ++i) {
      if (Order::token(t, i) < n) lanes |= ((1 << kQueries) - 1) << (i * kQueries);
    }
    return static_cast<__mmask16>(lanes);
  }
};

// 2^x for x <= 0 within 2 ulp; -inf gives 0 and NaN stays NaN. A polynomial on [0, 1) that is exact at both
// ends; scalef takes the integer part itself.
inline vf vexp2(vf x) {
  const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  vf p = vfma(vset(1.8793168710544705e-3f), r, vset(8.99099837988615e-3f));
  p = vfma(p, r, vset(5.5818673223257065e-2f));
  p = vfma(p, r, vset(2.40159273147583e-1f));
  p = vfma(p, r, vset(6.931517124176025e-1f));
  p = vfma(p, r, vset(1.0f));
  return _mm512_scalef_ps(p, x);
}

// One step in stages, so that tile instructions can be put between them: start, then exponentials for all
// vectors, then finish. x becomes 2^(x - max), zero from token n on.
template <int Vectors = 16, class Order = Halves>
struct SoftmaxStep {
  using L = Lanes<Order>;
  vf old, top, shift, sum[2];

  void start(vf* x, int n, const float* running_max) {
    const vf none = vset(-__builtin_inff());
    if (n < Vectors * L::kSlots) {
      for (int t = 0; t < Vectors; ++t) x[t] = _mm512_mask_mov_ps(none, L::first(t, n), x[t]);
    }
    old = L::spread(running_max);
    vf best[4] = {old, old, old, old};
#pragma GCC unroll 16
    for (int t = 0; t < Vectors; ++t) best[t % 4] = vmax(x[t], best[t % 4]);
    top = L::max(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
    shift = _mm512_mask_mov_ps(top, _mm512_cmp_ps_mask(top, none, _CMP_EQ_OQ), vzero());
    sum[0] = sum[1] = vzero();
  }

  template <int Count = 4>
  void exponentials(vf* x, int first) {
#pragma GCC unroll 4
    for (int t = first; t < first + Count; ++t) {
      x[t] = vexp2(vsub(x[t], shift));
      sum[t % 2] = vadd(sum[t % 2], x[t]);
    }
  }

  // Whether a maximum grew; `factor` is then what earlier sums must be multiplied by.
  bool finish(float* running_max, float* running_sum, vf& factor) {
    const vf total = L::sum(vadd(sum[0], sum[1]));
    vf before = L::spread(running_sum);
    const bool grew = _mm512_cmp_ps_mask(old, top, _CMP_NEQ_UQ) != 0;
    if (grew) {
      // A maximum that stays gives exactly 1, also while both are -inf.
      factor =
          _mm512_mask_mov_ps(vexp2(vsub(old, shift)), _mm512_cmp_ps_mask(old, top, _CMP_EQ_OQ), vset(1.0f));
      before = vmul(before, factor);
      L::keep(running_max, top);
    }
    L::keep(running_sum, vadd(before, total));
    return grew;
  }
};

// Scores of a step (scaled, not capped) -> capped, kept for the caller who asked for weights, times log2(e).
template <int Vectors = 16, class Order = Halves>
void cap_and_keep(const AttendGroup& s, int g0, vf* x, int n, int64_t token0) {
  using L = Lanes<Order>;
  for (int t = 0; t < Vectors; ++t) {
    if (s.softcap > 0) x[t] = vmul(vtanh(vdiv(x[t], vset(s.softcap))), vset(s.softcap));
    if (s.weights) {
      alignas(64) float lane[16];
      vstore(lane, x[t]);
      for (int i = 0; i < L::kSlots; ++i) {
        const int token = Order::token(t, i);
        for (int g = 0; token < n && g < L::kQueries && g0 + g < s.group; ++g) {
          s.weights[g0 + g][token0 + token] = lane[i * L::kQueries + g];
        }
      }
    }
    x[t] = vmul(x[t], vset(kLog2E));
  }
}

}  // namespace
}  // namespace coattn::amx
