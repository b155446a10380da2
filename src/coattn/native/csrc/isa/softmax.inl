// One tile's step of the online softmax of one query.
namespace coattn::COATTN_ISA {
namespace {

// scores[0..n) -> exp(score - max), zero up to a multiple of W; returns what the query's earlier sums must be
// scaled by. Scores that are all -inf leave the state as it is; a NaN makes the sum NaN.
inline float softmax_tile(float* scores, int n, float scale, float softcap, float& running_max,
                          float& running_sum, float* raw) {
  vf best = vset(-__builtin_inff());
  for (int t = 0; t < n; t += W) {
    vf s = vmul(vload(scores + t), vset(scale));
    if (softcap > 0) s = vmul(vtanh(vdiv(s, vset(softcap))), vset(softcap));
    s = vkeep(s, n - t < W ? n - t : W, -__builtin_inff());
    vstore(scores + t, s);
    best = vmax(s, best);
  }
  if (raw) std::memcpy(raw, scores, static_cast<size_t>(n) * sizeof(float));
  const float tile_max = vhmax(best);
  const float new_max = tile_max > running_max ? tile_max : running_max;
  const float shift = new_max == -__builtin_inff() ? 0.0f : new_max;
  vf total = vzero();
  for (int t = 0; t < n; t += W) {
    const vf p = vexp(vsub(vload(scores + t), vset(shift)));
    vstore(scores + t, p);
    total = vadd(total, p);
  }
  // Lane 0 of a vector exp rather than a libm call, so that one set of instructions gives one answer.
  float factor = 1.0f;
  if (new_max != running_max) {
    alignas(64) float lanes[W];
    vstore(lanes, vexp(vset(running_max - shift)));
    factor = lanes[0];
  }
  running_sum = running_sum * factor + vhsum(total);
  running_max = new_max;
  return factor;
}

inline void exp_minus(float* row, int64_t n, float shift) {
  int64_t i = 0;
  for (; i + W <= n; i += W) vstore(row + i, vexp(vsub(vload(row + i), vset(shift))));
  if (i < n) {
    alignas(64) float rest[W] = {};
    std::memcpy(rest, row + i, sizeof(float) * static_cast<size_t>(n - i));
    vstore(rest, vexp(vsub(vload(rest), vset(shift))));
    std::memcpy(row + i, rest, sizeof(float) * static_cast<size_t>(n - i));
  }
}

}  // namespace
}  // namespace coattn::COATTN_ISA
