// int8 and int4 keys and values with integer tiles: codes are multiplied as integers, scales are folded into
// the other side.
//
// Scores: as in isa/avx512_dot.inl the query times the block's key scales is rounded to 15 bits, 128 * high +
// low, two signed bytes. Values: a weight times its token's value scale is rounded to 16 bits of the largest
// of the step, 256 * high + low, two unsigned bytes. Sums are exact in 32 bits.
//
// What vector code wrote can be loaded into a tile only once it has left the store buffer, and the other way
// round, and waiting for that costs as much as the arithmetic. So the work is a pipeline over units (a step
// of 32 tokens and a batch of 16 queries): while unit u is scored, the values of u - 1 are added and the
// queries of u + 1 are prepared.
//
// Tiles: 0..3 sums, 4 keys, 5 queries, 6 weights, 7 values. For up to 8 queries the low parts use the columns
// (scores) and rows (values) 8..15 of the same tiles, which would be idle.
namespace coattn::amx {
namespace {

template <Elem E>
struct Int {
  static constexpr bool kFour = E == Elem::int4;
  static constexpr int kHalves = kFour ? 2 : 1;  // parts of a row that are unpacked and scaled on their own

  // Channels of a part, and the same rounded up to whole tile rows of 64.
  static int part(const AttendGroup& s) { return s.head_size / kHalves; }
  static int room(const AttendGroup& s) { return (part(s) + 63) / 64 * 64; }
  static int chunks(const AttendGroup& s) { return kHalves * room(s) / 64; }
  static int acc_stride(const AttendGroup& s) { return kHalves * room(s); }
  static int batches(const AttendGroup& s) { return (s.group + kQueries - 1) / kQueries; }

  static void begin(AttendGroup& s) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = 16;
      config.bytes[i] = 64;
    }
    // Weights and values meet over 32 tokens: 32 bytes of a weight row, 8 rows of 4 tokens.
    config.bytes[6] = 32;
    config.rows[7] = 8;
    configure(config);
    state_of(s)->prepared = state_of(s)->pending = false;
    // Queries with the parts where quantise() wants them.
    for (int g = 0; g < s.group; ++g) {
      float* to = s.prep + static_cast<int64_t>(g) * acc_stride(s);
      for (int h = 0; h < kHalves; ++h) {
        for (int d = 0; d < room(s); ++d) {
          to[h * room(s) + d] =
              d < part(s) ? s.q[static_cast<int64_t>(g) * s.stride + h * part(s) + d] : 0.0f;
        }
      }
    }
    for (int g = 0; g < batches(s) * kQueries; ++g) {
      s.max[g] = -__builtin_inff();
      s.sum[g] = s.v_bias[2 * g] = s.v_bias[2 * g + 1] = 0;
    }
    std::memset(
        s.acc, 0,
        sizeof(float) * static_cast<size_t>(batches(s) * kQueries) * static_cast<size_t>(acc_stride(s)));
  }

  static void tile(AttendGroup& s, const AttendTile& tile, const AttendTile* next) {
    State& state = *state_of(s);
    NextTile ahead = next_tile(next, elem_bytes(E, s.head_size));
    if (next) {
      Ahead scales{reinterpret_cast<const uint8_t*>(next->k_scale),
                   reinterpret_cast<const uint8_t*>(next->v_min + 2 * next->n)};
      while (scales.at < scales.end) scales.step<1>();
    }
    Unit unit{&tile, 0, 0};
    if (!state.prepared) prepare(s, state, unit);
    while (unit.tile == &tile) {
      Unit following = unit;
      if (++following.batch == batches(s)) {
        following.batch = 0;
        following.t0 += kStep;
        if (following.t0 >= tile.n) following = {next, 0, 0};
      }
      run(s, state, unit, following, ahead);
      unit = following;
    }
    while (ahead.v.at < ahead.v.end) ahead.step<4>();
  }

  static void end(AttendGroup& s, float* out) {
    State& state = *state_of(s);
    if (state.pending) {
      NextTile none;
      multiply_values(s, state, 0);
      add_values(s, state, none);
    }
    _tile_release();
    const int width = part(s), padded = room(s);
    for (int g = 0; g < s.group; ++g) {
      const float* acc = s.acc + static_cast<int64_t>(g) * acc_stride(s);
      for (int d = 0; d < s.head_size; ++d) {
        // Column 4 l + i of quarter j of a chunk holds channel 16 l + 4 j + i: the order of two rounds of
        // vpunpck.
        const int h = d / width, at = h * padded + d % width / 64 * 64 + d % width % 16 / 4 * 16 +
                                      d % width % 64 / 16 * 4 + d % 4;
        out[static_cast<int64_t>(g) * s.head_size + d] = acc[at] + s.v_bias[2 * g + (kFour ? h : 0)];
      }
    }
  }

 private:
  struct Unit {
    const AttendTile* tile;
    int t0, batch;
  };

  // What passes from one unit to the next, at the start of the group's working memory.
  struct alignas(64) State {
    bool prepared, pending;
    int batch;         // of the pending unit
    vf steps, biases;  // of the prepared queries
    __m512i weights[kHalves][16];
    float weight_steps[kHalves][kQueries];
    int32_t up[2][4][16][16], down[2][4][16][16];  // products of the pending unit, two chunks of channels
  };
  static_assert(sizeof(State) <= kFoldExtra);
  static State* state_of(const AttendGroup& s) { return reinterpret_cast<State*>(s.fold); }

  // Then, for rows of `row` bytes: queries high and low (16 rows each), keys and packed values (kStep rows
  // each).
  struct Memory {
    __m512i *high, *low;
    uint8_t *keys, *packed;
  };
  static Memory memory(const AttendGroup& s) {
    const int row = acc_stride(s);
    uint8_t* at = reinterpret_cast<uint8_t*>(state_of(s) + 1);
    return {reinterpret_cast<__m512i*>(at), reinterpret_cast<__m512i*>(at + 16 * row), at + 32 * row,
            at + 64 * row};
  }

  static int tokens(const Unit& u) { return u.tile->n - u.t0 < kStep ? u.tile->n - u.t0 : kStep; }
  static bool unpacking(const AttendGroup& s, const Unit& u) {
    return kFour || tokens(u) < kStep || s.head_size % 64;
  }
  static int queries(const AttendGroup& s, int batch) {
    const int left = s.group - batch * kQueries;
    return left < kQueries ? left : kQueries;
  }

  static void prepare(const AttendGroup& s, State& state, const Unit& u) {
    const Memory m = memory(s);
    quantise(s, u.batch * kQueries, queries(s, u.batch), *u.tile, m.high, m.low, state.steps, state.biases);
    stay_awake();
    if (u.batch == 0 && unpacking(s, u)) {
      unpack(s, u.tile->k + u.t0 * u.tile->k_stride, u.tile->k_stride, tokens(u), m.keys, acc_stride(s));
    }
    state.prepared = true;
  }

  static void run(AttendGroup& s, State& state, const Unit& u, const Unit& following, NextTile& next) {
    const Memory m = memory(s);
    const AttendTile& tile = *u.tile;
    const int n = tokens(u), g0 = u.batch * kQueries;
    alignas(64) __m512i sums[4][16];
    alignas(64) vf scores[kStep];
    if (unpacking(s, u)) {
      dot(s, m.keys, acc_stride(s), m.high, m.low, sums, next);
    } else {
      dot(s, tile.k + u.t0 * tile.k_stride, tile.k_stride, m.high, m.low, sums, next);
    }
    if (state.pending) multiply_values(s, state, 0);
    const vf steps = state.steps, biases = state.biases;
    state.prepared = false;
    if (following.tile) prepare(s, state, following);
    if (state.pending) add_values(s, state, next);
    if (u.batch == 0) {
      // The pending products are done with the packed values of the step before.
      pack_values(s, tile.v + u.t0 * tile.v_stride, tile.v_stride, n, m.packed, next);
    }
    finish_scores(s, sums, steps, biases, scores);
    if (s.weights) keep_scores(s, g0, scores, n, tile.token0 + u.t0, s.scale, s.softcap);
    stay_awake();
    const vf factor = softmax_step(s, g0, scores, n, next);
    stay_awake();
    if (!all_ones(factor)) {
      rescale(s.acc + static_cast<int64_t>(g0) * acc_stride(s), acc_stride(s), acc_stride(s), factor);
    }
    for (int h = 0; h < kHalves; ++h) {
      weigh(s, scores, n, tile.v_scale + h * tile.v_group_stride + u.t0,
            tile.v_min + h * tile.v_group_stride + u.t0, factor, s.v_bias + 2 * g0 + h, state.weights[h],
            state.weight_steps[h]);
    }
    if constexpr (!kFour) {
      for (int g = g0; g < g0 + kQueries; ++g) s.v_bias[2 * g + 1] = s.v_bias[2 * g];
    }
    state.batch = u.batch;
    state.pending = true;
  }

  static __m512i load_part(const uint8_t* p, int left) {
    return left >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, p);
  }

  // Rows of codes as bytes, one part after the other, zero beyond the part and beyond row n.
  static void unpack(const AttendGroup& s, const uint8_t* from, int64_t stride, int n, uint8_t* to,
                     int64_t row) {
    const int bytes = part(s), padded = room(s);
    const __m512i nibble = _mm512_set1_epi8(15);
    const bool whole = n == kStep && bytes == padded;
    for (int t = 0; t < kStep; ++t) {
      for (int c = 0; c < padded; c += 64) {
        const __m512i x = whole   ? _mm512_loadu_si512(from + t * stride + c)
                          : t < n ? load_part(from + t * stride + c, bytes - c)
                                  : _mm512_setzero_si512();
        if constexpr (kFour) {
          _mm512_store_si512(to + t * row + c, _mm512_and_si512(x, nibble));
          _mm512_store_si512(to + t * row + padded + c, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
        } else {
          _mm512_store_si512(to + t * row + c, x);
        }
      }
    }
  }

  // packed[chunk][quarter][8 groups of 4 tokens][16 channels][4 tokens]
  static void pack_values(const AttendGroup& s, const uint8_t* v, int64_t stride, int n, uint8_t* packed,
                          NextTile& next) {
    const int bytes = part(s), padded = room(s);
    const __m512i nibble = _mm512_set1_epi8(15);
    const bool whole = n == kStep && bytes == padded;
    for (int i = 0; i < kStep / 4; ++i) {
      for (int c = 0; c < padded; c += 64) {
        __m512i x[4];
        for (int j = 0; j < 4; ++j) {
          x[j] = whole           ? _mm512_loadu_si512(v + (4 * i + j) * stride + c)
                 : 4 * i + j < n ? load_part(v + (4 * i + j) * stride + c, bytes - c)
                                 : _mm512_setzero_si512();
        }
        for (int h = 0; h < kHalves; ++h) {
          __m512i y[4];
          for (int j = 0; j < 4; ++j) {
            y[j] = !kFour ? x[j] : _mm512_and_si512(h == 0 ? x[j] : _mm512_srli_epi16(x[j], 4), nibble);
          }
          const __m512i a = _mm512_unpacklo_epi8(y[0], y[1]), b = _mm512_unpackhi_epi8(y[0], y[1]);
          const __m512i d = _mm512_unpacklo_epi8(y[2], y[3]), e = _mm512_unpackhi_epi8(y[2], y[3]);
          uint8_t* to = packed + (h * padded + c) * kStep + i * 64;
          _mm512_store_si512(to, _mm512_unpacklo_epi16(a, d));
          _mm512_store_si512(to + 512, _mm512_unpackhi_epi16(a, d));
          _mm512_store_si512(to + 1024, _mm512_unpacklo_epi16(b, e));
          _mm512_store_si512(to + 1536, _mm512_unpackhi_epi16(b, e));
        }
        next.step<2>();
      }
      if (i % 4 == 3) stay_awake();
    }
  }

  // 64 consecutive channels of 32-bit integers as bytes. Within its lane of 128 bits vpack keeps 4
  // consecutive channels together, so that 32-bit word 4 l + i holds the 4 channels of word 4 i + l: `word`
  // below puts them right.
  static __m512i narrow(const __m512i* x) {
    return _mm512_packs_epi16(_mm512_packs_epi32(x[0], x[1]), _mm512_packs_epi32(x[2], x[3]));
  }
  static int word(int i) { return i % 4 * 4 + i / 4; }

  // Per-channel float16 of a block as floats, part after part, zero in the padding.
  static void widen(const AttendGroup& s, const uint16_t* from, float* to) {
    const int width = part(s), padded = room(s);
    for (int h = 0; h < kHalves; ++h) {
      for (int d = 0; d < padded; d += W) {
        const __mmask16 mask = first_lanes(width - d < 0 ? 0 : width - d);
        vstore(to + h * padded + d, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from + h * width + d)));
      }
    }
  }

  // The queries of a batch times the block's key scales, in 15 bits, as B tiles: high[chunk], low[chunk] of
  // [16][64]. score = sum * step + bias.
  static void quantise(const AttendGroup& s, int g0, int batch, const AttendTile& tile, __m512i* high,
                       __m512i* low, vf& steps, vf& biases) {
    const int width = acc_stride(s);
    const bool low_columns = s.group <= 8;
    alignas(64) float step[kQueries] = {}, bias[kQueries] = {};
    alignas(64) float scale[1024], least[1024], folded[1024];
    alignas(64) __m512i rows[2][1024 / 64][16];
    widen(s, tile.k_scale, scale);
    widen(s, tile.k_min, least);
    for (int g = 0; g < kQueries; ++g) {
      const int low_row = low_columns ? 8 + g : g;
      __m512i(*low_rows)[16] = rows[low_columns ? 0 : 1];
      if (g >= batch) {
        if (low_row >= kQueries) break;
        for (int c = 0; c < width / 64; ++c) rows[0][c][g] = low_rows[c][low_row] = _mm512_setzero_si512();
        continue;
      }
      const float* q = s.prep + static_cast<int64_t>(g0 + g) * width;
      vf peak[2] = {vzero(), vzero()}, sum[2] = {vzero(), vzero()};
      for (int d = 0; d < width; d += 2 * W) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const vf x = vload(q + d + i * W), y = vmul(x, vload(scale + d + i * W));
          vstore(folded + d + i * W, y);
          peak[i] = vmax(vabs(y), peak[i]);
          sum[i] = vfma(x, vload(least + d + i * W), sum[i]);
        }
      }
      const float top = vhmax(vmax(peak[0], peak[1]));
      const vf inverse = vset(top > 0 ? 16256.0f / top : 0.0f);
      step[g] = top * (1.0f / 16256.0f);
      bias[g] = vhsum(vadd(sum[0], sum[1]));
      if (g % 2) stay_awake();
      for (int c = 0; c < width / 64; ++c) {
        __m512i up[4], down[4];
        for (int i = 0; i < 4; ++i) {
          const __m512i fixed = _mm512_cvtps_epi32(vmul(vload(folded + 64 * c + W * i), inverse));
          up[i] = _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_set1_epi32(64)), 7);
          down[i] = _mm512_sub_epi32(fixed, _mm512_slli_epi32(up[i], 7));
        }
        rows[0][c][g] = narrow(up);
        low_rows[c][low_row] = narrow(down);
      }
    }
    stay_awake();
    for (int c = 0; c < width / 64; ++c) {
      transpose(rows[0][c]);
      for (int i = 0; i < 16; ++i) high[16 * c + word(i)] = rows[0][c][i];
      if (low_columns) continue;
      transpose(rows[1][c]);
      for (int i = 0; i < 16; ++i) low[16 * c + word(i)] = rows[1][c][i];
    }
    steps = vload(step);
    biases = vload(bias);
  }

  // sums: high parts of tokens 0..15 and 16..31, then low parts unless they share the high parts' tiles.
  static void dot(const AttendGroup& s, const uint8_t* keys, int64_t row, const __m512i* high,
                  const __m512i* low, __m512i (*sums)[16], NextTile& next) {
    publish();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < chunks(s); ++c) {
      const uint8_t* at = keys + 64 * c;
      _tile_loadd(5, high + 16 * c, 64);
      _tile_loadd(4, at, row);
      _tile_dpbusd(0, 4, 5);
      _tile_loadd(4, at + 16 * row, row);
      _tile_dpbusd(1, 4, 5);
      if (s.group > 8) {
        _tile_loadd(5, low + 16 * c, 64);
        _tile_dpbusd(3, 4, 5);
        _tile_loadd(4, at, row);
        _tile_dpbusd(2, 4, 5);
      }
      next.step<4>();
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (s.group > 8) {
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    }
  }

  static void finish_scores(const AttendGroup& s, const __m512i (*sums)[16], vf steps, vf biases,
                            vf* scores) {
    stay_awake();
    const bool shared = s.group <= 8;
#pragma GCC unroll 4
    for (int t = 0; t < kStep; ++t) {
      const __m512i up = sums[t / 16][t % 16];
      const __m512i down = shared ? _mm512_shuffle_i64x2(up, up, 0xee) : sums[2 + t / 16][t % 16];
      // Lanes 8..15 are no queries where the low parts live there.
      scores[t] = vfma(_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(up, 7), down)), steps, biases);
    }
  }

  // Weights times the value scales of one part in 16 bits: row g of m is 32 bytes of high parts, then 32 of
  // low parts; for up to 8 queries row 8 + g starts with the low parts of row g. Also adds weights times
  // value minima to bias.
  static void weigh(const AttendGroup& s, const vf* p, int n, const uint16_t* scale, const uint16_t* low,
                    vf factor, float* bias, __m512i* m, float* steps) {
    alignas(64) float scales[kStep], lows[kStep];
    for (int i = 0; i < kStep; i += W) {
      const __mmask16 mask = first_lanes(n - i < 0 ? 0 : n - i);
      vstore(scales + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, scale + i)));
      vstore(lows + i, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, low + i)));
    }
    vf peak[2] = {vzero(), vzero()}, sum[2] = {vzero(), vzero()};
#pragma GCC unroll 4
    for (int t = 0; t < kStep; ++t) {
      peak[t % 2] = vmax(vmul(p[t], vset(scales[t])), peak[t % 2]);
      sum[t % 2] = vfma(p[t], vset(lows[t]), sum[t % 2]);
    }
    stay_awake();
    add_bias(bias, vadd(sum[0], sum[1]), factor);
    const vf top = vmax(peak[0], peak[1]);
    vstore(steps, vmul(top, vset(1.0f / 65535.0f)));
    const vf inverse = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(vzero(), top, _CMP_LT_OQ), vset(65535.0f), top);
    const __m512i even = _mm512_set1_epi32(0x00ff00ff);
    for (int i = 0; i < 8; ++i) {
      __m512i x[4];
      for (int j = 0; j < 4; ++j) {
        x[j] = _mm512_cvtps_epi32(vmul(vmul(p[4 * i + j], vset(scales[4 * i + j])), inverse));
      }
      // Tokens 0 and 2, and 1 and 3, as halves of a word; then their high bytes and their low bytes.
      const __m512i a = _mm512_or_si512(x[0], _mm512_slli_epi32(x[2], 16));
      const __m512i b = _mm512_or_si512(x[1], _mm512_slli_epi32(x[3], 16));
      m[i] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(a, 8), even), _mm512_andnot_si512(even, b));
      m[8 + i] = _mm512_or_si512(_mm512_and_si512(a, even), _mm512_slli_epi32(_mm512_and_si512(b, even), 8));
    }
    stay_awake();
    transpose(m);
    if (s.group <= 8) {
      for (int g = 0; g < 8; ++g) m[8 + g] = _mm512_shuffle_i64x2(m[g], m[g], 0xee);
    }
  }

  // Products of the pending unit for chunks c0 and c0 + 1 of 64 channels.
  static void multiply_values(const AttendGroup& s, State& state, int c0) {
    const Memory m = memory(s);
    for (int c = c0; c < c0 + 2 && c < chunks(s); ++c) {
      const __m512i* w = state.weights[c * 64 / room(s)];
      multiply(w, m.packed + c * 64 * kStep, state.up[c - c0]);
      if (s.group > 8) {
        multiply(reinterpret_cast<const uint8_t*>(w) + 32, m.packed + c * 64 * kStep, state.down[c - c0]);
      }
    }
  }

  // acc += products. The first two chunks are there; the others of large heads are multiplied on the way.
  static void add_values(AttendGroup& s, State& state, NextTile& next) {
    const bool low_rows = s.group <= 8;
    const int stride = acc_stride(s);
    float* acc = s.acc + static_cast<int64_t>(state.batch) * kQueries * stride;
    for (int c0 = 0; c0 < chunks(s); c0 += 2) {
      if (c0 > 0) multiply_values(s, state, c0);
      stay_awake();
      for (int c = c0; c < c0 + 2 && c < chunks(s); ++c) {
        const float* step = state.weight_steps[c * 64 / room(s)];
        for (int g = 0; g < queries(s, state.batch); ++g) {
          float* to = acc + g * stride + c * 64;
          for (int j = 0; j < 4; ++j) {
            const __m512i a = _mm512_load_si512(state.up[c - c0][j][g]);
            const __m512i b =
                _mm512_load_si512(low_rows ? state.up[c - c0][j][8 + g] : state.down[c - c0][j][g]);
            const vf sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(a, 8), b));
            vstore(to + 16 * j, vfma(sum, vset(step[g]), vload(to + 16 * j)));
          }
          next.step<1>();
        }
      }
    }
    state.pending = false;
  }

  static void multiply(const void* weights, const uint8_t* values, int32_t (*to)[16][16]) {
    publish();
    _tile_loadd(6, weights, 64);
    _tile_zero(0);
    _tile_loadd(7, values, 64);
    _tile_dpbuud(0, 6, 7);
    _tile_zero(1);
    _tile_loadd(7, values + 512, 64);
    _tile_dpbuud(1, 6, 7);
    _tile_zero(2);
    _tile_loadd(7, values + 1024, 64);
    _tile_dpbuud(2, 6, 7);
    _tile_zero(3);
    _tile_loadd(7, values + 1536, 64);
    _tile_dpbuud(3, 6, 7);
    _tile_stored(0, to[0], 64);
    _tile_stored(1, to[1], 64);
    _tile_stored(2, to[2], 64);
    _tile_stored(3, to[3], 64);
  }

  static void add_bias(float* bias, vf more, vf factor) {
    alignas(64) float add[kQueries], times[kQueries];
    vstore(add, more);
    vstore(times, factor);
    for (int g = 0; g < kQueries; ++g) bias[2 * g] = bias[2 * g] * times[g] + add[g];
  }
};

}  // namespace
}  // namespace coattn::amx
