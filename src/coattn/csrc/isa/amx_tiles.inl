// What both AMX kernels need: tile configuration, transposes, padded rows, the softmax of a transposed tile.
//
// Scores are computed transposed, [token][query]: keys then enter the tile unit as they lie in memory,
// queries are packed once, and the softmax runs over 16 queries per vector without a horizontal step.
namespace coattn::amx {
namespace {

using namespace avx512;  // vf and its functions, compiled anew in this translation unit

constexpr int kStep = 32;     // tokens at a time
constexpr int kQueries = 16;  // queries at a time, one per lane

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// GCC's tile loads do not tell the compiler that they read memory. This does: stores before it happen before
// it.
inline void publish() {
  __asm__ volatile("" ::: "memory");
}

inline void configure(const TileConfig& config) {
  publish();
  _tile_loadconfig(&config);
}

// The tile unit falls asleep after some 150 ns without work and takes 250-300 ns to wake (measured on Emerald
// Rapids: 39 ns for the four multiplications of a step right after others, 300 ns after 200 ns of vector
// code). So vector code in the integer kernel multiplies something nobody needs every 100 ns or so (the bf16
// kernel's pauses are too short to need it). Tile 3 holds nothing that lives across vector code.
inline void stay_awake() {
  _tile_dpbuud(3, 6, 7);
}

// In place: x[i] lane j <-> x[j] lane i.
inline void transpose(__m512i* x) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // x[4 a + r] holds, in 128-bit lane l, rows 4 a .. 4 a + 3 of column 4 l + r.
  for (int r = 0; r < 4; ++r) {
    const __m512i ab_low = _mm512_shuffle_i32x4(x[r], x[4 + r], 0x44),
                  ab_high = _mm512_shuffle_i32x4(x[r], x[4 + r], 0xee);
    const __m512i cd_low = _mm512_shuffle_i32x4(x[8 + r], x[12 + r], 0x44);
    const __m512i cd_high = _mm512_shuffle_i32x4(x[8 + r], x[12 + r], 0xee);
    y[r] = _mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
    y[4 + r] = _mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
    y[8 + r] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
    y[12 + r] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// kStep rows of `to_stride` bytes, zero where the source has no row or no byte.
inline void pad_rows(const uint8_t* from, int64_t from_stride, int n, int row_bytes, uint8_t* to,
                     int to_stride) {
  for (int t = 0; t < n; ++t) copy_tail(to + t * to_stride, from + t * from_stride, row_bytes, to_stride);
  for (int t = n; t < kStep; ++t) std::memset(to + t * to_stride, 0, static_cast<size_t>(to_stride));
}

// The next tile's bytes, keys then values, spread over all the work on this one.
struct NextTile {
  Ahead k{nullptr, nullptr}, v{nullptr, nullptr};
  template <int Lines>
  void step() {
    if (k.at < k.end) {
      k.step<Lines>();
    } else {
      v.step<Lines>();
    }
  }
};

inline NextTile next_tile(const AttendTile* next, int64_t row_bytes) {
  if (!next) return {};
  return {ahead_of(next->k, next->k_stride, next->n, row_bytes),
          ahead_of(next->v, next->v_stride, next->n, row_bytes)};
}

// One step of the online softmax for 16 queries: rows of s become exp(score - max), zero from row n on.
// Returns the factors for earlier sums.
//
// Half: at most 8 queries. Two tokens then share a vector, and lanes 8..15 of every result repeat or are
// garbage.
template <bool Half>
inline vf softmax_step(vf* s, int n, float scale, float softcap, float* running_max, float* running_sum,
                       NextTile& next) {
  constexpr int rows = Half ? kStep / 2 : kStep;
  const vf none = vset(-__builtin_inff());
  vf best[2] = {none, none};
#pragma GCC unroll 4
  for (int t = 0; t < rows; ++t) {
    vf x = s[t];
    if constexpr (Half) x = _mm512_shuffle_f32x4(s[t], s[t + rows], 0x44);
    x = vmul(x, vset(scale));
    if (softcap > 0) x = vmul(vtanh(vdiv(x, vset(softcap))), vset(softcap));
    if (n < kStep) {
      const __mmask16 first = t < n ? 0x00ff : 0, second = (Half ? t + rows : t) < n ? 0xff00 : 0;
      x = _mm512_mask_mov_ps(none, static_cast<__mmask16>(first | second), x);
    }
    s[t] = x;
    best[t % 2] = vmax(x, best[t % 2]);
    next.step<Half ? 2 : 1>();
  }
  const vf old = vload(running_max);
  vf top = vmax(vmax(best[0], best[1]), old);
  if constexpr (Half) top = vmax(_mm512_shuffle_f32x4(top, top, 0x4e), top);
  const vf shift = _mm512_mask_mov_ps(top, _mm512_cmp_ps_mask(top, none, _CMP_EQ_OQ), vzero());
  vf sum[2] = {vzero(), vzero()};
#pragma GCC unroll 4
  for (int t = 0; t < rows; ++t) {
    const vf p = vexp(vsub(s[t], shift));
    s[t] = p;
    if constexpr (Half) s[t + rows] = _mm512_shuffle_f32x4(p, p, 0xee);
    sum[t % 2] = vadd(sum[t % 2], p);
    next.step<Half ? 4 : 2>();
  }
  vf total = vadd(sum[0], sum[1]);
  if constexpr (Half) total = vadd(total, _mm512_shuffle_f32x4(total, total, 0x4e));
  // A maximum that stays gives exactly 1, also while both are -inf.
  const vf factor =
      _mm512_mask_mov_ps(vexp(vsub(old, shift)), _mm512_cmp_ps_mask(old, top, _CMP_EQ_OQ), vset(1.0f));
  vstore(running_sum, vfma(vload(running_sum), factor, total));
  vstore(running_max, top);
  return factor;
}

inline vf softmax_step(const AttendGroup& s, int g0, vf* scores, int n, NextTile& next) {
  auto* step = s.group <= 8 ? softmax_step<true> : softmax_step<false>;
  return step(scores, n, s.scale, s.softcap, s.max + g0, s.sum + g0, next);
}

// Raw scores (scaled and capped, before the exponential) to the callers' weight rows.
inline void keep_scores(const AttendGroup& s, int g0, const vf* scores, int n, int64_t token, float scale,
                        float softcap) {
  for (int t = 0; t < n; ++t) {
    vf x = vmul(scores[t], vset(scale));
    if (softcap > 0) x = vmul(vtanh(vdiv(x, vset(softcap))), vset(softcap));
    alignas(64) float lane[kQueries];
    vstore(lane, x);
    for (int g = 0; g < kQueries && g0 + g < s.group; ++g) s.weights[g0 + g][token + t] = lane[g];
  }
}

inline bool all_ones(vf x) {
  return _mm512_cmp_ps_mask(x, vset(1.0f), _CMP_EQ_OQ) == 0xffff;
}

// acc rows g0 .. g0 + 15 (of `columns` floats) times their factor.
inline void rescale(float* acc, int64_t row_stride, int columns, vf factor) {
  alignas(64) float lane[kQueries];
  vstore(lane, factor);
  for (int g = 0; g < kQueries; ++g) {
    if (lane[g] == 1.0f) continue;
    for (int d = 0; d < columns; d += W)
      vstore(acc + g * row_stride + d, vmul(vload(acc + g * row_stride + d), vset(lane[g])));
  }
}

// Where the three padded copies of a step live: kStep rows each of `bytes` bytes.
struct Buffers {
  uint8_t *k, *v, *packed;
};
inline Buffers buffers(const AttendGroup& s, int bytes) {
  uint8_t* at = reinterpret_cast<uint8_t*>(s.fold);
  return {at, at + kStep * bytes, at + 2 * kStep * bytes};
}

}  // namespace
}  // namespace coattn::amx
