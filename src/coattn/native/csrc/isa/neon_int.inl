// int8 keys and values with SDOT, four products of signed bytes a lane.
//
// Codes 0..255 become signed by taking 128 away, which is one exclusive or. What multiplies them, a query times its
// key scales or a weight times its value scale, is rounded to 16 bits of its largest and split as 256 * high + low
// into two signed bytes: an error of 1/65024 of that, far below the codes' own. Sums of a lane are exact in 32 bits:
// at most 256 * 127 * 128 * 256 for keys of 1,024 channels, 64 * 127 * 128 * 256 for the values of a tile.
namespace coattn::COATTN_ISA {
namespace {

inline constexpr float kSplitTop = 32512.0f;  // 127 * 256

inline uint8x16_t signed_codes(uint8x16_t x) {
  return veorq_u8(x, vdupq_n_u8(0x80));
}

// x * inverse, 16 of them within +-kSplitTop, as high and low bytes.
inline void split(const float* x, vf inverse, int8_t* high, int8_t* low) {
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
  const auto fixed = [&](int i) {
    return vreinterpretq_s16_f32(vfma(vload(x + i), inverse, vset(12582912.0f)));
  };
  const int16x8_t a = vuzp1q_s16(fixed(0), fixed(4)), b = vuzp1q_s16(fixed(8), fixed(12));
  const int16x8_t half = vdupq_n_s16(128);
  vst1q_s8(low, vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b)));
  vst1q_s8(high,
           vuzp2q_s8(vreinterpretq_s8_s16(vaddq_s16(a, half)), vreinterpretq_s8_s16(vaddq_s16(b, half))));
}

inline vf joined(int32x4_t high, int32x4_t low) {
  return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(high, 8), low));
}

struct SdotDot {
  static constexpr int kMaxBytes = 1024;

  static void begin(AttendGroup&) {}

  static void run(const AttendGroup& s, int g0, int batch, const AttendTile& tile, Ahead& ahead,
                  float* scores) {
    alignas(16) int8_t q[kQueryBatch][2][kMaxBytes];  // [query][high, low][bytes]
    float step[kQueryBatch], bias[kQueryBatch];
    quantise(s, g0, batch, tile, q, step, bias);
    Ahead mine = ahead;  // in registers
    int g = 0;
    for (; g + 4 <= batch; g += 4) queries<4>(s, &q[g], step + g, bias + g, tile, mine, scores + g * kTile);
    if (batch & 2) {
      queries<2>(s, &q[g], step + g, bias + g, tile, mine, scores + g * kTile);
      g += 2;
    }
    if (batch & 1) queries<1>(s, &q[g], step + g, bias + g, tile, mine, scores + g * kTile);
    ahead = mine;
  }

 private:
  // q . (min + scale * code) = (q * scale) . (code - 128) + q . (min + 128 * scale)
  static void quantise(const AttendGroup& s, int g0, int batch, const AttendTile& tile,
                       int8_t (*q)[2][kMaxBytes], float* step, float* bias) {
    const int size = s.head_size;  // a multiple of 8
    alignas(16) float scale[kMaxBytes], base[kMaxBytes], y[kMaxBytes + 8];
    for (int d = 0; d < size; d += W) {
      const vf x = vload_f16(tile.k_scale + d);
      vstore(scale + d, x);
      vstore(base + d, vfma(x, vset(128.0f), vload_f16(tile.k_min + d)));
    }
    for (int t = 0; t < 8; t += W) vstore(y + size + t, vzero());
    for (int g = 0; g < batch; ++g) {
      const float* row = s.q + (g0 + g) * s.stride;
      vf peak[2] = {vzero(), vzero()}, sum[2] = {vzero(), vzero()};
      for (int d = 0; d < size; d += 2 * W) {
        each<2>([&](auto i) {
          const vf x = vload(row + d + W * i), scaled = vmul(x, vload(scale + d + W * i));
          vstore(y + d + W * i, scaled);
          peak[i] = vmaxnmq_f32(peak[i], vabs(scaled));
          sum[i] = vfma(x, vload(base + d + W * i), sum[i]);
        });
      }
      const float top = vhmax(vmaxnmq_f32(peak[0], peak[1]));
      const vf inverse = vset(top > 0 ? kSplitTop / top : 0.0f);
      step[g] = top * (1.0f / kSplitTop);
      bias[g] = vhsum(vadd(sum[0], sum[1]));
      for (int d = 0; d < size; d += 16) split(y + d, inverse, &q[g][0][d], &q[g][1][d]);
    }
  }

  template <int MG>
  static void queries(const AttendGroup& s, const int8_t (*q)[2][kMaxBytes], const float* step,
                      const float* bias, const AttendTile& tile, Ahead& ahead, float* scores) {
    constexpr int MT = 8 / MG;
    const int full = s.head_size / 16;
    for (int t0 = 0; t0 < tile.n; t0 += MT) {
      const uint8_t* row[MT];
      each<MT>([&](auto t) { row[t] = tile.k + (t0 + t < tile.n ? t0 + t : tile.n - 1) * tile.stride; });
      int32x4_t high[8], low[8];
      each<8>([&](auto i) { high[i] = low[i] = vdupq_n_s32(0); });
      auto chunk = [&](int c, auto load) __attribute__((always_inline)) {
        each<MT>([&](auto t) {
          const int8x16_t codes = vreinterpretq_s8_u8(signed_codes(load(row[t] + 16 * c)));
          each<MG>([&](auto g) {
            high[g * MT + t] = vdotq_s32(high[g * MT + t], codes, vld1q_s8(&q[g][0][16 * c]));
            low[g * MT + t] = vdotq_s32(low[g * MT + t], codes, vld1q_s8(&q[g][1][16 * c]));
          });
        });
        ahead.step<(MT * 16 + 63) / 64>();
      };
      for (int c = 0; c < full; ++c) chunk(c, [](const uint8_t* p) { return vld1q_u8(p); });
      if (s.head_size % 16) {
        chunk(full, [](const uint8_t* p) { return vcombine_u8(vld1_u8(p), vdup_n_u8(0)); });
      }
      alignas(16) float sums[8];
      each<2>([&](auto i) {
        const vf lanes[W] = {joined(high[4 * i], low[4 * i]), joined(high[4 * i + 1], low[4 * i + 1]),
                             joined(high[4 * i + 2], low[4 * i + 2]),
                             joined(high[4 * i + 3], low[4 * i + 3])};
        vstore(sums + 4 * i, vreduce(lanes));
      });
      each<MG>([&](auto g) {
        each<MT>([&](auto t) { scores[g * kTile + t0 + t] = sums[g * MT + t] * step[g] + bias[g]; });
      });
    }
  }
};

// The bytes of four tokens are interleaved (two rounds of zip) and meet their four weights in one lane.
struct SdotSum {
  static int stride(const AttendGroup& s) { return s.stride; }

  static void add(AttendGroup& s, int g0, int batch, const float* alpha, const AttendTile& tile,
                  const float* weights, Ahead& ahead) {
    Bytes bytes[kQueryBatch];
    for (int g = 0; g < batch; ++g) {
      // sum of w * code = sum of w * (code - 128) + 128 * sum of w
      s.v_bias[g0 + g] += 128.0f * quantise(weights + g * kTile, tile.n, bytes[g]);
    }
    Ahead mine = ahead;  // in registers
    float* acc = s.acc + static_cast<int64_t>(g0) * s.stride;
    for (int d = 0; d < s.head_size; d += 16) {
      int g = 0;
      for (; g + 2 <= batch; g += 2) chunk<2>(s, acc + g * s.stride + d, d, alpha + g, tile, bytes + g, mine);
      if (batch & 1) chunk<1>(s, acc + g * s.stride + d, d, alpha + g, tile, bytes + g, mine);
    }
    ahead = mine;
  }

  static void natural(const AttendGroup& s, const float* acc, float* row) {
    std::memcpy(row, acc, sizeof(float) * static_cast<size_t>(s.head_size));
  }

 private:
  struct Bytes {
    alignas(16) int8_t high[kTile], low[kTile];
    float step;
  };

  // Zero past the tile's last token, up to a multiple of 16. Returns the sum of w.
  static float quantise(const float* w, int n, Bytes& to) {
    alignas(16) float padded[kTile];
    vf peak = vzero(), sum = vzero();
    for (int t = 0; t < n; t += W) {
      const vf x = vkeep(vload(w + t), n - t, 0.0f);
      vstore(padded + t, x);
      peak = vmaxnmq_f32(peak, vabs(x));
      sum = vadd(sum, x);
    }
    for (int t = (n + W - 1) / W * W; t % 16; t += W) vstore(padded + t, vzero());
    const float top = vhmax(peak);
    const vf inverse = vset(top > 0 ? kSplitTop / top : 0.0f);
    to.step = top * (1.0f / kSplitTop);
    for (int t = 0; t < n; t += 16) split(padded + t, inverse, to.high + t, to.low + t);
    return vhsum(sum);
  }

  // Channels d .. d + 15 of every row for MG queries.
  template <int MG>
  static void chunk(const AttendGroup& s, float* acc, int d, const float* alpha, const AttendTile& tile,
                    const Bytes* bytes, Ahead& ahead) {
    int32x4_t high[MG * 4], low[MG * 4];
    each<MG * 4>([&](auto i) { high[i] = low[i] = vdupq_n_s32(0); });
    const bool whole = s.head_size - d >= 16;
    // Tokens t .. t + 15.
    auto tokens = [&](int t, auto load) __attribute__((always_inline)) {
      int8x16_t up[MG], down[MG];
      each<MG>([&](auto g) {
        up[g] = vld1q_s8(bytes[g].high + t);
        down[g] = vld1q_s8(bytes[g].low + t);
      });
      each<4>([&](auto four) {
        const auto at = [&](int i) { return signed_codes(load(t + 4 * four + i)); };
        const uint8x16_t x0 = at(0), x1 = at(1), x2 = at(2), x3 = at(3);
        const auto a = vreinterpretq_u16_u8(vzip1q_u8(x0, x1)), b = vreinterpretq_u16_u8(vzip2q_u8(x0, x1));
        const auto c = vreinterpretq_u16_u8(vzip1q_u8(x2, x3)), e = vreinterpretq_u16_u8(vzip2q_u8(x2, x3));
        const int8x16_t v[4] = {
            vreinterpretq_s8_u16(vzip1q_u16(a, c)), vreinterpretq_s8_u16(vzip2q_u16(a, c)),
            vreinterpretq_s8_u16(vzip1q_u16(b, e)), vreinterpretq_s8_u16(vzip2q_u16(b, e))};
        each<MG>([&](auto g) {
          each<4>([&](auto j) {
            high[g * 4 + j] = vdotq_laneq_s32(high[g * 4 + j], v[j], up[g], four);
            low[g * 4 + j] = vdotq_laneq_s32(low[g * 4 + j], v[j], down[g], four);
          });
        });
        ahead.step<1>();
      });
    };
    int t = 0;
    if (whole) {
      const uint8_t* base = tile.v + d;
      for (; t + 16 <= tile.n; t += 16) {
        tokens(t, [&](int at) { return vld1q_u8(base + at * tile.stride); });
      }
    }
    for (; t < tile.n; t += 16) {
      // rows past the last repeat it: their weights are zero
      tokens(t, [&](int at) {
        const uint8_t* p = tile.v + (at < tile.n ? at : tile.n - 1) * tile.stride + d;
        return whole ? vld1q_u8(p) : vcombine_u8(vld1_u8(p), vdup_n_u8(0));
      });
    }
    each<MG>([&](auto g) {
      const vf factor = vset(alpha[g]), step = vset(bytes[g].step);
      float* to = acc + g * s.stride;
      each<4>([&](auto j) {
        const vf sum = joined(high[g * 4 + j], low[g * 4 + j]);
        vstore(to + W * j, vfma(sum, step, vmul(vload(to + W * j), factor)));
      });
    });
  }
};

}  // namespace
}  // namespace coattn::COATTN_ISA
