// The queries' side of the integer scores.
//
// q . (min + scale * code) = (q * scale) . code + q . min, and scale is the block's own: q * scale is rounded
// to 16 bits of its largest channel and split into two signed bytes, 256 * high + low, so the query's
// rounding (1/65024 of the largest channel) stays far below the codes' own (1/510 of the range).
//
// A vector holds four channels of four queries, one query to 128 bits: the channels' scales are one broadcast
// load, and one shuffle makes the four high and the four low bytes of each query. Columns 0..7 of the tile
// are the high bytes of 8 queries, columns 8..15 the low bytes of the same.
namespace coattn::amx {
namespace {

constexpr int kChunk = kRowBytes;  // channels of a tile: their codes are a row of it

// A row of codes in whole tiles.
struct IntShape {
  explicit IntShape(int head_size)
      : size(head_size), row((size + kChunk - 1) / kChunk * kChunk), chunks(row / kChunk) {}

  int size;    // channels
  int row;     // the same, padded
  int chunks;  // tiles
};

// Per batch of 8 queries: [row / 4][8 queries][4] over their largest channel, [row] the largest of all, [16]
// by how much each was divided.
struct IntQuery {
  static constexpr int kMaxRow = 1024;

  // A block's scales and minima as floats, the scales such that products fill 16 bits.
  struct Scales {
    alignas(64) float scales[kMaxRow], least[kMaxRow];
    float top;
  };

  static int64_t floats(const IntShape& x) { return int64_t{9} * x.row + 16; }

  static void begin(const AttendGroup& s, const IntShape& x, int batch) {
    float* prep = s.prep + batch * floats(x);
    float *peaks = prep + 8 * x.row, *tops = peaks + x.row;
    float inverse[kLanes];
    std::memset(prep, 0, sizeof(float) * static_cast<size_t>(9 * x.row));
    for (int g = 0; g < kLanes; ++g) {
      const int at = batch * kLanes + g;
      vf top = vzero();
      for (int d = 0; at < s.group && d < s.stride; d += W) top = vmax(vabs(vload(query(s, at) + d)), top);
      tops[g] = tops[8 + g] = vhmax(top);
      inverse[g] = tops[g] > 0 ? 1.0f / tops[g] : 0.0f;
    }
    for (int g = 0; g < kLanes && batch * kLanes + g < s.group; ++g) {
      for (int c = 0; c < x.row; c += W) {
        const __mmask16 mask = first_lanes(x.size - c < 0 ? 0 : x.size - c);
        const float* from = query(s, batch * kLanes + g) + c;
        const vf y = vmul(_mm512_maskz_loadu_ps(mask, from), vset(inverse[g]));
        vstore(peaks + c, vmax(vabs(y), vload(peaks + c)));
        float* to = prep + c * 8 + g * 4;
        _mm_store_ps(to, _mm512_castps512_ps128(y));
        _mm_store_ps(to + 32, _mm512_extractf32x4_ps(y, 1));
        _mm_store_ps(to + 64, _mm512_extractf32x4_ps(y, 2));
        _mm_store_ps(to + 96, _mm512_extractf32x4_ps(y, 3));
      }
    }
  }

  static void widen(const AttendGroup& s, const IntShape& x, int batch, const AttendTile& tile, Scales& to) {
    const float* peaks = s.prep + batch * floats(x) + 8 * x.row;
    vf peak = vzero();
    for (int c = 0; c < x.row; c += W) {
      const vf width = channels(x, tile.k_scale, c);
      vstore(to.scales + c, width);
      vstore(to.least + c, channels(x, tile.k_min, c));
      peak = vmax(vmul(width, vload(peaks + c)), peak);
    }
    to.top = vhmax(peak);
    const vf inverse = vset(to.top > 0 ? kMost / to.top : 0.0f);
    for (int c = 0; c < x.row; c += W) vstore(to.scales + c, vmul(vload(to.scales + c), inverse));
  }

  // The B tiles of a batch for one block, [row / 4][16 columns][4 channels]; a score times `scale` is sum *
  // step + bias. between(i) is called after every 16 channels.
  template <class Between>
  static void fold(const AttendGroup& s, const IntShape& x, int batch, const Scales& block, float scale,
                   uint8_t* to, vf& steps, vf& biases, Ahead& next, Between&& between) {
    const float* prep = s.prep + batch * floats(x);
    const vf sums = s.group - batch * kLanes > 4 ? quads<true>(x, prep, block, to, next, between)
                                                 : quads<false>(x, prep, block, to, next, between);
    const vf tops_scaled = vmul(vload(prep + 9 * x.row), vset(scale));
    steps = vmul(tops_scaled, vset(block.top * (1.0f / kMost)));
    biases = vmul(tops_scaled, sums);
  }

 private:
  static constexpr float kMost = 127 * 256;

  static const float* query(const AttendGroup& s, int g) { return s.q + static_cast<int64_t>(g) * s.stride; }

  // 16 float16 of the block's channels, zero in the padding.
  static vf channels(const IntShape& x, const uint16_t* from, int c) {
    if (c + W <= x.size) return vload_f16(from + c);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(x.size - c < 0 ? 0 : x.size - c), from + c));
  }

  static vf four(const float* p) { return _mm512_broadcast_f32x4(_mm_load_ps(p)); }

  // Writes the tiles; returns q . min, queries 0..7 twice. With at most four queries, theirs twice over.
  template <bool Eight, class Between>
  static vf quads(const IntShape& x, const float* prep, const Scales& block, uint8_t* to, Ahead& next,
                  Between& between) {
    const __m512i columns = Eight
                                ? _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29)
                                : _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 1, 5, 9, 13, 1, 5, 9, 13);
    // The low byte carries the 128 that was added to round the high one.
    const __m512i flip = _mm512_maskz_set1_epi32(0xff00, static_cast<int>(0x80808080u));
    vf first[2] = {vzero(), vzero()}, second[2] = {vzero(), vzero()};
    for (int c = 0; c < x.row; c += 8) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const vf scale = four(block.scales + c + 4 * i), least = four(block.least + c + 4 * i);
        const vf p = vload(prep + (c + 4 * i) * 8);
        const __m512i a = bytes(p, scale);
        first[i] = vfma(p, least, first[i]);
        __m512i row;
        if constexpr (Eight) {
          const vf q = vload(prep + (c + 4 * i) * 8 + 16);
          row = _mm512_permutex2var_epi32(a, columns, bytes(q, scale));
          second[i] = vfma(q, least, second[i]);
        } else {
          row = _mm512_permutexvar_epi32(columns, a);
        }
        _mm512_store_si512(to + (c + 4 * i) * 16, _mm512_xor_si512(row, flip));
      }
      next.step<2>();
      if (c % 16) between(c / 16);
    }
    const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    return _mm512_permutex2var_ps(sum_of_four(vadd(first[0], first[1])), places,
                                  sum_of_four(vadd(second[0], second[1])));
  }

  // Adding 1.5 * 2^23 leaves the rounded product in a float's low bits. In 128 bits: four high bytes, four
  // low.
  static __m512i bytes(vf q, vf scale) {
    const __m512i fixed = _mm512_castps_si512(vfma(q, scale, vset(12582912.0f + 128.0f)));
    return _mm512_shuffle_epi8(fixed, _mm512_broadcast_i32x4(_mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, -1, -1,
                                                                           -1, -1, -1, -1, -1, -1)));
  }

  // In every 128 bits.
  static vf sum_of_four(vf a) {
    a = vadd(a, _mm512_permute_ps(a, 0xb1));
    return vadd(a, _mm512_permute_ps(a, 0x4e));
  }
};

}  // namespace
}  // namespace coattn::amx
