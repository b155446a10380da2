// Weighted sums of int8 values with VNNI's integer dot products.
//
// vpdpbusd adds four products of neighbouring bytes, so four tokens' values are interleaved (two rounds of
// vpunpck) and meet four tokens' weights in one broadcast word. A weight times its token's value scale is
// rounded to 15 bits of the tile's largest and split as 128 * high + low into two signed bytes: an error of
// 1/32512 of that, far below the codes' own. Sums are exact in 32 bits.
namespace coattn::avx512 {
namespace {

struct VnniSum {
  // A row in whole vectors of 64 bytes; each has a sum per channel.
  static int chunks(const AttendGroup& s) { return (s.head_size + 63) / 64; }
  static int stride(const AttendGroup& s) { return 64 * chunks(s); }

  static void add(AttendGroup& s, int g0, int batch, const float* alpha, const AttendTile& tile,
                  const float* weights, Ahead& ahead) {
    Bytes bytes[kQueryBatch];
    for (int g = 0; g < batch; ++g) quantise(weights + g * kTile, tile.n, bytes[g]);
    float* acc = s.acc + static_cast<int64_t>(g0) * stride(s);
    for (int c = 0; c < chunks(s); ++c) {
      const int left = s.head_size - 64 * c;
      const __mmask64 mask = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
      int g = 0;
      for (; g + 2 <= batch; g += 2) chunk<2>(s, acc, g, c, mask, alpha, tile, bytes, ahead);
      if (batch & 1) chunk<1>(s, acc, g, c, mask, alpha, tile, bytes, ahead);
    }
  }

  static void natural(const AttendGroup& s, const float* acc, float* row) {
    for (int d = 0; d < s.head_size; ++d) {
      // Vector j of a chunk holds channels 16 l + 4 j + i in lane 4 l + i: the order of vpunpck.
      row[d] = acc[d / 64 * 64 + d % 16 / 4 * 16 + d % 64 / 16 * 4 + d % 4];
    }
  }

 private:
  struct Bytes {
    alignas(16) int8_t high[kTile], low[kTile];
    float step;
  };

  // Zero past the tile's last token, up to a multiple of 16.
  static void quantise(const float* w, int n, Bytes& to) {
    vf peak = vzero();
    for (int t = 0; t < n; t += W) peak = vmax(_mm512_maskz_loadu_ps(first_lanes(n - t), w + t), peak);
    const float top = vhmax(peak);
    const vf inverse = vset(top > 0 ? 16256.0f / top : 0.0f);
    to.step = top * (1.0f / 16256.0f);
    for (int t = 0; t < n; t += W) {
      const __m512i fixed =
          _mm512_cvtps_epi32(vmul(_mm512_maskz_loadu_ps(first_lanes(n - t), w + t), inverse));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_set1_epi32(64)), 7);
      const __m512i low = _mm512_sub_epi32(fixed, _mm512_slli_epi32(high, 7));
      _mm_store_si128(reinterpret_cast<__m128i*>(to.high + t), _mm512_cvtepi32_epi8(high));
      _mm_store_si128(reinterpret_cast<__m128i*>(to.low + t), _mm512_cvtepi32_epi8(low));
    }
  }

  static __m512i word(const int8_t* p) {
    int x;
    std::memcpy(&x, p, sizeof(x));
    return _mm512_set1_epi32(x);
  }

  // 64 bytes of every row for MG queries.
  template <int MG>
  static void chunk(const AttendGroup& s, float* acc, int g, int c, __mmask64 mask, const float* alpha,
                    const AttendTile& tile, const Bytes* bytes, Ahead& ahead) {
    __m512i high[MG][4], low[MG][4];
    for (int m = 0; m < MG; ++m) {
      for (int j = 0; j < 4; ++j) high[m][j] = low[m][j] = _mm512_setzero_si512();
    }
    for (int t = 0; t < tile.n; t += 4) {
      __m512i q[4];
      interleave(tile, t, 64 * c, mask, q);
      for (int m = 0; m < MG; ++m) {
        const Bytes& b = bytes[g + m];
        const __m512i up = word(b.high + t), down = word(b.low + t);
        for (int j = 0; j < 4; ++j) {
          high[m][j] = _mm512_dpbusd_epi32(high[m][j], q[j], up);
          low[m][j] = _mm512_dpbusd_epi32(low[m][j], q[j], down);
        }
      }
      ahead.step<4>();
    }
    for (int m = 0; m < MG; ++m) {
      float* to = acc + static_cast<int64_t>(g + m) * stride(s) + 64 * c;
      const vf factor = vset(alpha[g + m]), step = vset(bytes[g + m].step);
      for (int j = 0; j < 4; ++j) {
        const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high[m][j], 7), low[m][j]);
        vstore(to + W * j, vfma(_mm512_cvtepi32_ps(both), step, vmul(vload(to + W * j), factor)));
      }
    }
  }

  // Rows t .. t + 3 (the last one again past the end: its weights are zero), four tokens of a channel a word.
  static void interleave(const AttendTile& tile, int t, int at, __mmask64 mask, __m512i* q) {
    __m512i x[4];
    for (int i = 0; i < 4; ++i) {
      const int row = t + i < tile.n ? t + i : tile.n - 1;
      x[i] = _mm512_maskz_loadu_epi8(mask, tile.v + row * tile.stride + at);
    }
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
    q[0] = _mm512_unpacklo_epi16(a, c);
    q[1] = _mm512_unpackhi_epi16(a, c);
    q[2] = _mm512_unpacklo_epi16(b, d);
    q[3] = _mm512_unpackhi_epi16(b, d);
  }
};

}  // namespace
}  // namespace coattn::avx512
