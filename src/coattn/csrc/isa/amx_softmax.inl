// The online softmax of up to 8 queries and 32 tokens, two tokens a vector: vector t holds token t in lanes
// 0..7 and token t + 16 in lanes 8..15. In powers of two: scores come times log2(e), and so does the maximum.
namespace coattn::amx {
namespace {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

inline vf swap_halves(vf x) {
  return _mm512_shuffle_f32x4(x, x, 0x4e);
}
inline vf both_halves(const float* p) {
  return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
}

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

// One step in stages, so that tile instructions can be put between them: start, then exponentials for all 16
// vectors, then finish. x becomes 2^(x - max), zero from token n on.
struct SoftmaxStep {
  vf old, top, shift, sum[2];

  void start(vf* x, int n, const float* running_max) {
    const vf none = vset(-__builtin_inff());
    if (n < kStep) {
      for (int t = 0; t < 16; ++t) {
        const int lanes = (t < n ? 0x00ff : 0) | (t + 16 < n ? 0xff00 : 0);
        x[t] = _mm512_mask_mov_ps(none, static_cast<__mmask16>(lanes), x[t]);
      }
    }
    old = both_halves(running_max);
    vf best[4] = {old, old, old, old};
#pragma GCC unroll 16
    for (int t = 0; t < 16; ++t) best[t % 4] = vmax(x[t], best[t % 4]);
    top = vmax(vmax(best[0], best[1]), vmax(best[2], best[3]));
    top = vmax(top, swap_halves(top));
    shift = _mm512_mask_mov_ps(top, _mm512_cmp_ps_mask(top, none, _CMP_EQ_OQ), vzero());
    sum[0] = sum[1] = vzero();
  }

  // Vectors first .. first + 3.
  void exponentials(vf* x, int first) {
#pragma GCC unroll 4
    for (int t = first; t < first + 4; ++t) {
      x[t] = vexp2(vsub(x[t], shift));
      sum[t % 2] = vadd(sum[t % 2], x[t]);
    }
  }

  // Whether a maximum grew; `factor` is then what earlier sums must be multiplied by.
  bool finish(float* running_max, float* running_sum, vf& factor) {
    vf total = vadd(sum[0], sum[1]);
    total = vadd(total, swap_halves(total));
    vf before = both_halves(running_sum);
    const bool grew = _mm512_cmp_ps_mask(old, top, _CMP_NEQ_UQ) != 0;
    if (grew) {
      // A maximum that stays gives exactly 1, also while both are -inf.
      factor =
          _mm512_mask_mov_ps(vexp2(vsub(old, shift)), _mm512_cmp_ps_mask(old, top, _CMP_EQ_OQ), vset(1.0f));
      before = vmul(before, factor);
      _mm256_storeu_ps(running_max, _mm512_castps512_ps256(top));
    }
    _mm256_storeu_ps(running_sum, _mm512_castps512_ps256(vadd(before, total)));
    return grew;
  }
};

// Scores of a step (scaled, not capped) -> capped, kept for the caller who asked for weights, times log2(e).
inline void cap_and_keep(const AttendGroup& s, int g0, vf* x, int n, int64_t token) {
  for (int t = 0; t < 16; ++t) {
    if (s.softcap > 0) x[t] = vmul(vtanh(vdiv(x[t], vset(s.softcap))), vset(s.softcap));
    if (s.weights) {
      alignas(64) float lane[16];
      vstore(lane, x[t]);
      for (int g = 0; g < kLanes && g0 + g < s.group; ++g) {
        if (t < n) s.weights[g0 + g][token + t] = lane[g];
        if (t + 16 < n) s.weights[g0 + g][token + t + 16] = lane[8 + g];
      }
    }
    x[t] = vmul(x[t], vset(kLog2E));
  }
}

}  // namespace
}  // namespace coattn::amx
