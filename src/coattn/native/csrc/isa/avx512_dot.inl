// Scores with VNNI's integer dot products.
//
// There is no vdpbf16ps here: measured on Emerald Rapids it takes 0.82 ns for 32 products where an FMA takes
// 0.21 ns for 16, so widening bf16 keys (a shift and a mask for 32 channels, shared by up to four queries)
// and multiplying in float32 is faster, and exact in the query. bf16 products pay with tiles only
// (isa/amx.cpp).
namespace coattn::avx512 {
namespace {

// int8 keys: vpdpbusd, 64 products of a code (0..255) and a signed byte an instruction.
//
// q * scale is rounded to 15 bits of its largest channel and split as 128 * high + low into two signed bytes,
// so the query's rounding (1/32512 of its largest channel) stays far below the codes' own (1/510 of the
// range).
struct VnniDot {
  static constexpr int kMaxBytes = 1024 + 64;

  static void begin(AttendGroup&) {}

  static void run(const AttendGroup& s, int g0, int batch, const AttendTile& tile, Ahead& ahead,
                  float* scores) {
    alignas(64) int8_t q[kQueryBatch][2][kMaxBytes];  // [query][high, low][bytes]
    float step[kQueryBatch], bias[kQueryBatch];
    quantise(s, g0, batch, tile, q, step, bias);
    int g = 0;
    for (; g + 2 <= batch; g += 2) queries<2>(s, &q[g], step + g, bias + g, tile, ahead, scores + g * kTile);
    if (batch & 1) queries<1>(s, &q[g], step + g, bias + g, tile, ahead, scores + g * kTile);
  }

 private:
  static void quantise(const AttendGroup& s, int g0, int batch, const AttendTile& tile,
                       int8_t (*q)[2][kMaxBytes], float* step, float* bias) {
    const int size = s.head_size, room = (size + 63) / 64 * 64;  // in whole vectors
    float* folded = s.fold;
    vf peak[kQueryBatch], sum[kQueryBatch];
    for (int g = 0; g < batch; ++g) peak[g] = sum[g] = vzero();
    for (int d = 0; d < size; d += W) {
      const __mmask16 mask = first_lanes(size - d);
      const vf scale = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, tile.k_scale + d));
      const vf low = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, tile.k_min + d));
      for (int g = 0; g < batch; ++g) {
        const vf x = _mm512_maskz_loadu_ps(mask, s.q + (g0 + g) * s.stride + d);
        const vf y = vmul(x, scale);
        _mm512_mask_storeu_ps(folded + g * s.stride + d, mask, y);
        peak[g] = vmax(vabs(y), peak[g]);
        sum[g] = vfma(x, low, sum[g]);
      }
    }
    for (int g = 0; g < batch; ++g) {
      const float top = vhmax(peak[g]);
      const float inverse = top > 0 ? 16256.0f / top : 0.0f;
      step[g] = top * (1.0f / 16256.0f);
      bias[g] = vhsum(sum[g]);
      for (int d = 0; d < room; d += W) {
        const __mmask16 mask = first_lanes(size - d < 0 ? 0 : size - d);
        const vf y = _mm512_maskz_loadu_ps(mask, folded + g * s.stride + d);
        const __m512i fixed = _mm512_cvtps_epi32(vmul(y, vset(inverse)));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_set1_epi32(64)), 7);
        const __m512i low = _mm512_sub_epi32(fixed, _mm512_slli_epi32(high, 7));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(&q[g][0][d]), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(&q[g][1][d]), _mm512_cvtepi32_epi8(low));
      }
    }
  }

  template <int MG>
  static void queries(const AttendGroup& s, const int8_t (*q)[2][kMaxBytes], const float* step,
                      const float* bias, const AttendTile& tile, Ahead& ahead, float* scores) {
    constexpr int MT = 8 / MG;
    const int full = s.head_size / 64, tail = s.head_size % 64;
    const __mmask64 tail_mask = (__mmask64{1} << tail) - 1;
    for (int t0 = 0; t0 < tile.n; t0 += 2 * MT) {
      vf lanes[kAccs];
      for (int half = 0; half < 2; ++half) {
        const uint8_t* row[MT];
        for (int t = 0; t < MT; ++t) {
          const int at = t0 + half * MT + t;
          row[t] = tile.k + (at < tile.n ? at : tile.n - 1) * tile.stride;
        }
        __m512i high[MG * MT], low[MG * MT];
        for (int i = 0; i < MG * MT; ++i) high[i] = low[i] = _mm512_setzero_si512();
        auto chunk = [&](int c, auto load) {
          __m512i codes[MT];
          for (int t = 0; t < MT; ++t) codes[t] = load(row[t] + 64 * c);
          for (int g = 0; g < MG; ++g) {
            const __m512i q_high = _mm512_loadu_si512(&q[g][0][64 * c]);
            const __m512i q_low = _mm512_loadu_si512(&q[g][1][64 * c]);
            for (int t = 0; t < MT; ++t) {
              high[g * MT + t] = _mm512_dpbusd_epi32(high[g * MT + t], codes[t], q_high);
              low[g * MT + t] = _mm512_dpbusd_epi32(low[g * MT + t], codes[t], q_low);
            }
          }
          ahead.step<MT>();
        };
        for (int c = 0; c < full; ++c) chunk(c, [](const uint8_t* p) { return _mm512_loadu_si512(p); });
        if (tail) chunk(full, [&](const uint8_t* p) { return _mm512_maskz_loadu_epi8(tail_mask, p); });
        for (int g = 0; g < MG; ++g) {
          for (int t = 0; t < MT; ++t) {
            // At most 255 * 127 * 128 * 4 * 16 a lane at 1024 channels: fits 32 bits.
            const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high[g * MT + t], 7), low[g * MT + t]);
            lanes[g * 2 * MT + half * MT + t] = _mm512_cvtepi32_ps(both);
          }
        }
      }
      alignas(64) float sums[kAccs];
      vstore(sums, vreduce(lanes));
      for (int g = 0; g < MG; ++g) {
        for (int t = 0; t < 2 * MT; ++t)
          scores[g * kTile + t0 + t] = sums[g * 2 * MT + t] * step[g] + bias[g];
      }
    }
  }
};

}  // namespace
}  // namespace coattn::avx512
