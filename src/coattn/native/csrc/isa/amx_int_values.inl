// The values' side of the integer kernel: weights as bytes, values in groups of four tokens, sums back to
// float.
//
// A weight times its token's value scale is rounded to 16 bits of the largest of the step, 256 * high + low,
// two unsigned bytes: rows 0..7 and 8..15 of the tile, or 0..3 and 4..7 of half a tile for up to four
// queries, which takes the tile unit half the time.
namespace coattn::amx {
namespace {

// Queries of a tile of weights, whose high bytes come first and whose low bytes follow.
constexpr int queries_of(bool few) {
  return few ? 4 : kLanes;
}

// Tile row of query g: what is left of a 4 x 4 transpose.
constexpr int row_of(int g, bool few) {
  return few ? g : g % 4 * 2 + g / 4;
}

// Lane (half h, query g) of x[i] is the word of tokens 16 h + 4 i .. + 3 -> rows of 32 bytes in token order.
inline void store_rows(const __m512i* x, bool few, uint8_t* to) {
  const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  const __m512i r[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c), _mm512_unpacklo_epi64(b, d),
                        _mm512_unpackhi_epi64(b, d)};
  for (int i = 0; i < 4; ++i) {
    const __m512i both = _mm512_shuffle_i64x2(r[i], r[i], 0xd8);
    if (few) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + 32 * i), _mm512_castsi512_si256(both));
    } else {
      _mm512_store_si512(to + 64 * i, both);
    }
  }
}

// Weights p (as SoftmaxStep leaves them) with their values' scales and minima. m: [16][kStep bytes], an A
// tile. steps: value of a unit of each query's weights. bias: sums of weight times minimum.
inline void weigh(const vf* p, int n, const uint16_t* scale, const uint16_t* low, bool few, uint8_t* m,
                  float* steps, vf& bias, Ahead& next) {
  alignas(64) float scales[kStep], lows[kStep];
  for (int i = 0; i < kStep; i += W) {
    const __mmask16 mask = first_lanes(n - i < 0 ? 0 : n - i);
    vstore(scales + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scale + i)));
    vstore(lows + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, low + i)));
  }
  vf w[16], peak[2] = {vzero(), vzero()}, first[2] = {vzero(), vzero()}, second[2] = {vzero(), vzero()};
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) {
    w[t] = _mm512_mask_mul_ps(vmul(p[t], vset(scales[t])), 0xff00, p[t], vset(scales[16 + t]));
    peak[t % 2] = vmax(w[t], peak[t % 2]);
    first[t % 2] = vfma(p[t], vset(lows[t]), first[t % 2]);
    second[t % 2] = vfma(p[t], vset(lows[16 + t]), second[t % 2]);
  }
  bias = _mm512_mask_blend_ps(0xff00, vadd(first[0], first[1]), vadd(second[0], second[1]));
  bias = vadd(bias, swap_halves(bias));
  // A power of two near the top, a little smaller so that the largest weight does not round to 65536.
  vf top = vmax(vmax(peak[0], peak[1]), vset(0x1p-100f));
  top = _mm512_getexp_ps(vmax(top, swap_halves(top)));
  vstore(steps, _mm512_scalef_ps(vset(1.0f / 32767.5f), top));
  const vf inverse = _mm512_scalef_ps(vset(32767.5f), vsub(vzero(), top));
  __m512i high[4], rest[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    next.step<4>();
    __m512i x[4];
    for (int j = 0; j < 4; ++j) x[j] = _mm512_castps_si512(vfma(w[4 * i + j], inverse, vset(8388608.0f)));
    high[i] = choose(0x0000ffff, choose(0x000000ff, _mm512_srli_epi32(x[0], 8), x[1]),
                     choose(0x00ff0000, _mm512_slli_epi32(x[2], 8), _mm512_slli_epi32(x[3], 16)));
    rest[i] = choose(0x0000ffff, choose(0x000000ff, x[0], _mm512_slli_epi32(x[1], 8)),
                     choose(0x00ff0000, _mm512_slli_epi32(x[2], 16), _mm512_slli_epi32(x[3], 24)));
  }
  store_rows(high, few, m);
  store_rows(rest, few, m + queries_of(few) * kStep);
}

// 4 values x 4 channels of bytes in each lane of 128 bits -> [channel][token]: two rounds of vpunpck.
inline void interleave(const __m512i* x, __m512i* q) {
  const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
  const __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
  q[0] = _mm512_unpacklo_epi16(a, c);
  q[1] = _mm512_unpackhi_epi16(a, c);
  q[2] = _mm512_unpacklo_epi16(b, d);
  q[3] = _mm512_unpackhi_epi16(b, d);
}

struct IntValues {
  static constexpr int kQuarters = 4;                      // a chunk's channels, 16 at a time
  static constexpr int kPacked = kStep / 4 * kRowBytes;    // bytes of one: 8 groups of 4 tokens
  static constexpr int kProducts = kRows * kRowBytes / 4;  // sums of one
  static constexpr int kWeightBytes = kRows * kStep;       // of a tile of weights

  // packed[chunk][quarter][8 groups of 4 tokens][16 channels][4 tokens] of kStep rows.
  static void pack(const IntShape& x, const uint8_t* rows, int64_t stride, uint8_t* packed, Ahead& next) {
    for (int i = 0; i < kStep / 4; ++i) {
      for (int c = 0; c < x.chunks; ++c) {
        __m512i y[4], q[kQuarters];
        for (int j = 0; j < 4; ++j) y[j] = _mm512_loadu_si512(rows + (4 * i + j) * stride + kChunk * c);
        interleave(y, q);
        uint8_t* to = packed + kQuarters * kPacked * c + kRowBytes * i;
        for (int j = 0; j < kQuarters; ++j) _mm512_store_si512(to + kPacked * j, q[j]);
        next.step<2>();
      }
    }
  }

  // The i-th of products[kQuarters * chunks][16][16]; they are asked for in order.
  static void multiply(const uint8_t* weights, const uint8_t* packed, int i, int32_t* products) {
    if (i == 0) _tile_loadd(6, weights, kStep);
    _tile_loadd(7, packed + kPacked * i, kRowBytes);
    _tile_zero(2);
    _tile_dpbuud(2, 6, 7);
    _tile_stored(2, products + kProducts * i, kRowBytes);
  }

  // acc [queries][row] += products
  static void add(const IntShape& x, int queries, const int32_t* products, const float* steps, float* acc,
                  bool few, Ahead& next) {
    const int low = queries_of(few) * 16;
    for (int c = 0; c < x.chunks; ++c, products += kQuarters * kProducts) {
      for (int g = 0; g < queries; ++g) {
        float* to = acc + static_cast<int64_t>(g) * x.row + kChunk * c;
        const vf step = vset(steps[g]);
#pragma GCC unroll 4
        for (int j = 0; j < kQuarters; ++j) {
          const int32_t* from = products + kProducts * j + 16 * row_of(g, few);
          const __m512i sum =
              _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(from), 8), _mm512_load_si512(from + low));
          vstore(to + 16 * j, vfma(_mm512_cvtepi32_ps(sum), step, vload(to + 16 * j)));
        }
        next.step<1>();
      }
    }
  }
};

}  // namespace
}  // namespace coattn::amx
