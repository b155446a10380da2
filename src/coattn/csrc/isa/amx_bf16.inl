// bf16 queries over bf16 keys and values with tiles.
//
// Scores: A = 16 keys x 32 channels as they lie, B = channel pairs x 16 queries, packed once per call.
// Values: A = 16 queries x 32 tokens of weights, B = token pairs x 16 channels, made from two value rows by
// one unpack each. A weight is split into two bf16 (high and low part, 2^-17 of it lost): for up to 8 queries
// the low parts use the tile's rows 8..15, which would be idle, and are added at the end; for more they cost
// a second multiplication.
namespace coattn::amx {
namespace {

struct Bf16 {
  // acc of one batch: [16][stride]; prep of one batch: [stride / 32][16 channel pairs][16 queries][2].
  static int batches(const AttendGroup& s) { return (s.group + kQueries - 1) / kQueries; }
  static bool low_rows(const AttendGroup& s) { return s.group <= 8; }

  static void begin(AttendGroup& s) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = 16;
      config.bytes[i] = 64;
    }
    configure(config);
    uint16_t* prep = reinterpret_cast<uint16_t*>(s.prep);
    for (int b = 0; b < batches(s); ++b) {
      for (int c = 0; c < s.stride / 32; ++c) {
        __m512i x[16];
        for (int g = 0; g < kQueries; ++g) {
          alignas(64) uint16_t row[32] = {};
          if (b * kQueries + g < s.group) {
            const float* q = s.q + static_cast<int64_t>(b * kQueries + g) * s.stride + 32 * c;
            vstore_bf16(row, vload(q));
            vstore_bf16(row + 16, vload(q + 16));
          }
          x[g] = _mm512_load_si512(row);
        }
        transpose(x);
        for (int i = 0; i < 16; ++i)
          _mm512_storeu_si512(prep + ((b * (s.stride / 32) + c) * 16 + i) * 32, x[i]);
      }
      for (int g = 0; g < kQueries; ++g) {
        s.max[b * kQueries + g] = -__builtin_inff();
        s.sum[b * kQueries + g] = 0;
      }
    }
    std::memset(s.acc, 0,
                sizeof(float) * static_cast<size_t>(batches(s) * kQueries) * static_cast<size_t>(s.stride));
  }

  static void tile(AttendGroup& s, const AttendTile& tile, const AttendTile* next) {
    NextTile ahead = next_tile(next, int64_t{2} * s.head_size);
    for (int t0 = 0; t0 < tile.n; t0 += kStep) step(s, tile, t0, ahead);
    while (ahead.v.at < ahead.v.end) ahead.step<4>();
  }

  static void end(AttendGroup& s, float* out) {
    _tile_release();
    const int low = low_rows(s) ? 8 * s.stride : 0;
    for (int g = 0; g < s.group; ++g) {
      const float* acc = s.acc + static_cast<int64_t>(g) * s.stride;
      for (int d = 0; d < s.head_size; ++d) {
        // Column 4 l + j of half h of a chunk holds channel 8 l + 4 h + j: the order of vpunpck.
        const int at = d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4 + d % 4;
        out[static_cast<int64_t>(g) * s.head_size + d] = acc[at] + (low ? acc[at + low] : 0.0f);
      }
    }
  }

 private:
  static void step(AttendGroup& s, const AttendTile& tile, int t0, NextTile& next) {
    const int n = tile.n - t0 < kStep ? tile.n - t0 : kStep, chunks = s.stride / 32, padded = 2 * s.stride;
    const Buffers buffer = buffers(s, padded);
    const uint8_t *k = tile.k + t0 * tile.k_stride, *v = tile.v + t0 * tile.v_stride;
    int64_t k_stride = tile.k_stride, v_stride = tile.v_stride;
    if (n < kStep || s.head_size % 32) {
      pad_rows(k, k_stride, n, 2 * s.head_size, buffer.k, padded);
      pad_rows(v, v_stride, n, 2 * s.head_size, buffer.v, padded);
      k = buffer.k;
      v = buffer.v;
      k_stride = v_stride = padded;
    }
    for (int b = 0; b < batches(s); ++b) {
      alignas(64) vf scores[kStep];
      dot(k, k_stride, reinterpret_cast<const uint8_t*>(s.prep) + static_cast<int64_t>(b) * chunks * 1024,
          chunks, next, scores);
      if (b == 0) pair_values(v, v_stride, chunks, buffer.packed, next);
      const int g0 = b * kQueries;
      if (s.weights) keep_scores(s, g0, scores, n, tile.token0 + t0, s.scale, s.softcap);
      vf factor = softmax_step(s, g0, scores, n, next);
      float* acc = s.acc + static_cast<int64_t>(g0) * s.stride;
      if (!all_ones(factor)) {
        // The rows of the low parts are scaled like those of the high parts.
        if (low_rows(s)) factor = _mm512_shuffle_f32x4(factor, factor, 0x44);
        rescale(acc, s.stride, s.stride, factor);
      }
      add_values(scores, low_rows(s), buffer.packed, chunks, acc, s.stride, next);
    }
  }

  static void dot(const uint8_t* k, int64_t k_stride, const uint8_t* q, int chunks, NextTile& next,
                  vf* scores) {
    publish();
    _tile_zero(0);
    _tile_zero(1);
    for (int c = 0; c < chunks; ++c) {
      _tile_loadd(4, q + c * 1024, 64);
      _tile_loadd(2, k + c * 64, k_stride);
      _tile_loadd(3, k + 16 * k_stride + c * 64, k_stride);
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 3, 4);
      next.step<8>();
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + 16, 64);
  }

  // Pairs of rows, word by word: packed[chunk][half][pair][16 channels][2].
  static void pair_values(const uint8_t* v, int64_t stride, int chunks, uint8_t* packed, NextTile& next) {
    for (int i = 0; i < 16; ++i) {
      const uint8_t *a = v + 2 * i * stride, *b = a + stride;
      for (int c = 0; c < chunks; ++c) {
        const __m512i x = _mm512_loadu_si512(a + 64 * c), y = _mm512_loadu_si512(b + 64 * c);
        _mm512_store_si512(packed + c * 2048 + i * 64, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(packed + c * 2048 + 1024 + i * 64, _mm512_unpackhi_epi16(x, y));
        next.step<1>();
      }
    }
  }

  static void add_values(const vf* p, bool low_rows, const uint8_t* packed, int chunks, float* acc,
                         int stride, NextTile& next) {
    alignas(64) __m512i high[16], low[16];
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
    for (int i = 0; i < 16; ++i) {
      __m512i h[2], l[2];
      for (int j = 0; j < 2; ++j) {
        h[j] = _mm512_and_si512(_mm512_castps_si512(p[2 * i + j]), top);
        const vf rest = vsub(p[2 * i + j], _mm512_castsi512_ps(h[j]));
        l[j] = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(rest), half), top);
      }
      high[i] = _mm512_or_si512(_mm512_srli_epi32(h[0], 16), h[1]);
      low[i] = _mm512_or_si512(_mm512_srli_epi32(l[0], 16), l[1]);
      if (low_rows) high[i] = _mm512_inserti64x4(high[i], _mm512_castsi512_si256(low[i]), 1);
    }
    transpose(high);
    if (!low_rows) transpose(low);
    publish();
    _tile_loadd(2, high, 64);
    if (!low_rows) _tile_loadd(3, low, 64);
    for (int c = 0; c < chunks; ++c) {
      _tile_loadd(0, acc + 32 * c, static_cast<int64_t>(stride) * 4);
      _tile_loadd(1, acc + 32 * c + 16, static_cast<int64_t>(stride) * 4);
      _tile_loadd(4, packed + c * 2048, 64);
      _tile_loadd(5, packed + c * 2048 + 1024, 64);
      next.step<8>();
      _tile_dpbf16ps(0, 2, 4);
      _tile_dpbf16ps(1, 2, 5);
      if (!low_rows) {
        _tile_dpbf16ps(0, 3, 4);
        _tile_dpbf16ps(1, 3, 5);
      }
      _tile_stored(0, acc + 32 * c, static_cast<int64_t>(stride) * 4);
      _tile_stored(1, acc + 32 * c + 16, static_cast<int64_t>(stride) * 4);
    }
  }
};

}  // namespace
}  // namespace coattn::amx
