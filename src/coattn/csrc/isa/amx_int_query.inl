// The queries' side of the integer scores.
//
// q . (min + scale * code) = (q * scale) . code + q . min, and scale is the block's own: q * scale is rounded
// to 16 bits of its largest channel and split into two signed bytes, 256 * high + low, so the query's
// rounding (1/65024 of the largest channel) stays far below the codes' own (1/510 or 1/30 of the range).
//
// Queries lie transposed, one channel a vector, so that a channel's scale is a broadcast operand, four
// channels make one row of the tile without a shuffle, and q . min needs no horizontal sum. Lanes 0..7 become
// the high bytes of 8 queries, lanes 8..15 the low bytes of the same.
namespace coattn::amx {
namespace {

// Per batch of 8 queries: [row][16] queries over their largest channel, [row] the largest of all, [16] by how
// much each was divided.
template <Elem E>
struct IntQuery {
  using Shape = IntShape<E>;

  static int64_t floats(const Shape& x) { return int64_t{17} * x.row + 16; }

  static void begin(const AttendGroup& s, const Shape& x, int batch) {
    float* prep = s.prep + batch * floats(x);
    float *peaks = prep + 16 * x.row, *tops = peaks + x.row;
    float inverse[kLanes];
    for (int g = 0; g < kLanes; ++g) {
      const int at = batch * kLanes + g;
      vf top = vzero();
      for (int d = 0; at < s.group && d < s.stride; d += W) top = vmax(vabs(vload(query(s, at) + d)), top);
      tops[g] = tops[8 + g] = vhmax(top);
      inverse[g] = tops[g] > 0 ? 1.0f / tops[g] : 0.0f;
    }
    for (int c = 0; c < x.row; c += W) {
      const int h = c / x.room, d = c % x.room;
      const __mmask16 mask = first_lanes(x.part - d < 0 ? 0 : x.part - d);
      __m512i rows[16];
      vf peak = vzero();
      for (int g = 0; g < kLanes; ++g) {
        const int at = batch * kLanes + g;
        vf y = vzero();
        if (at < s.group)
          y = vmul(_mm512_maskz_loadu_ps(mask, query(s, at) + h * x.part + d), vset(inverse[g]));
        peak = vmax(vabs(y), peak);
        rows[g] = rows[8 + g] = _mm512_castps_si512(y);
      }
      vstore(peaks + c, peak);
      transpose(rows);
      for (int i = 0; i < W; ++i) vstore(prep + (c + i) * 16, _mm512_castsi512_ps(rows[i]));
    }
  }

  // The B tiles of a batch for one block, [row / 4][16 columns][4 channels]; a score times `scale` is sum *
  // step + bias.
  static void fold(const AttendGroup& s, const Shape& x, int batch, const AttendTile& tile, float scale,
                   uint8_t* to, vf& steps, vf& biases, Ahead& next) {
    const float* prep = s.prep + batch * floats(x);
    const float *peaks = prep + 16 * x.row, *tops = peaks + x.row;
    alignas(64) float scales[kMaxRow], least[kMaxRow];
    vf peak = vzero();
    for (int c = 0; c < x.row; c += W) {
      const vf width = widen(x, tile.k_scale, c);
      vstore(scales + c, width);
      vstore(least + c, widen(x, tile.k_min, c));
      peak = vmax(vmul(width, vload(peaks + c)), peak);
    }
    const float top = vhmax(peak), inverse = top > 0 ? kMost / top : 0.0f;
    for (int c = 0; c < x.row; c += W) vstore(scales + c, vmul(vload(scales + c), vset(inverse)));
    vf sum[4] = {vzero(), vzero(), vzero(), vzero()};
    for (int c = 0; c < x.row; c += 4) {
      _mm512_store_si512(to + c * 16, quad(prep + c * 16, scales + c));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[i] = vfma(vload(prep + (c + i) * 16), vset(least[c + i]), sum[i]);
      next.step<1>();
    }
    const vf tops_scaled = vmul(vload(tops), vset(scale));
    steps = vmul(tops_scaled, vset(top * (1.0f / kMost)));
    biases = vmul(tops_scaled, vadd(vadd(sum[0], sum[1]), vadd(sum[2], sum[3])));
  }

 private:
  static constexpr int kMaxRow = 1024 + 64;
  static constexpr float kMost = 127 * 256;

  static const float* query(const AttendGroup& s, int g) { return s.q + static_cast<int64_t>(g) * s.stride; }

  // 16 float16 of the block's channels, zero in the padding.
  static vf widen(const Shape& x, const uint16_t* from, int c) {
    const int h = c / x.room, d = c % x.room;
    if (d + W <= x.part) return vload_f16(from + h * x.part + d);
    return _mm512_cvtph_ps(
        _mm256_maskz_loadu_epi16(first_lanes(x.part - d < 0 ? 0 : x.part - d), from + h * x.part + d));
  }

  // Four channels of all queries. Adding 1.5 * 2^23 leaves the rounded product in a float's low bits; low is
  // its last byte as a signed one, so high is the byte above after adding 128.
  static __m512i quad(const float* q, const float* scale) {
    const vf magic = _mm512_mask_blend_ps(0xff00, vset(12582912.0f + 128.0f), vset(12582912.0f));
    const auto pick = [](int high, int low) {
      return _mm512_mask_blend_epi32(0xff00, _mm512_set1_epi32(high), _mm512_set1_epi32(low));
    };
    const auto fixed = [&](int i) {
      return _mm512_castps_si512(vfma(vload(q + 16 * i), vset(scale[i]), magic));
    };
    const __m512i a = _mm512_srlv_epi32(fixed(0), pick(8, 0)), b = _mm512_sllv_epi32(fixed(1), pick(0, 8));
    const __m512i c = _mm512_sllv_epi32(fixed(2), pick(8, 16)), d = _mm512_sllv_epi32(fixed(3), pick(16, 24));
    const __m512i ab = choose(0x000000ff, a, b), cd = choose(0x00ff0000, c, d);
    return choose(0x0000ffff, ab, cd);
  }
};

}  // namespace
}  // namespace coattn::amx
