// int8 and int4 keys and values with integer tiles: codes are multiplied as integers, scales are folded into
// the queries (isa/amx_int_query.inl) and into the weights (isa/amx_int_values.inl). Sums are exact in 32
// bits.
//
// What vector code wrote can be loaded into a tile only once it has left the store buffer, and the other way
// round, and waiting for that costs as much as the arithmetic. So the work is a pipeline over units (a step
// of 32 tokens and a batch of 8 queries), with tile instructions a few at a time between vector code that
// does not need them: while the queries of u + 1 are folded the values of u - 1 are multiplied, and while the
// softmax of u is computed u + 1 is scored.
//
// Tiles: 0, 1 scores, 2 sums of values, 4 keys, 5 queries, 6 weights, 7 values.
namespace coattn::amx {
namespace {

template <Elem E>
struct Int {
  using Shape = IntShape<E>;
  using Values = IntValues<E>;
  static constexpr int kHalves = Shape::kHalves;

  static int batches(const AttendGroup& s) { return (s.group + kLanes - 1) / kLanes; }

  static void begin(AttendGroup& s) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = 16;
      config.bytes[i] = 64;
    }
    // Weights and values meet over 32 tokens: 32 bytes of a weight row, 8 rows of 4 tokens.
    config.bytes[6] = 32;
    config.rows[7] = 8;
    if (few(s)) config.rows[6] = config.rows[2] = 8;
    configure(config);
    const Shape x(s.head_size);
    state_of(s)->scored = state_of(s)->pending = false;
    for (int b = 0; b < batches(s); ++b) IntQuery<E>::begin(s, x, b);
    for (int g = 0; g < batches(s) * kLanes; ++g) {
      s.max[g] = -__builtin_inff();
      s.sum[g] = s.v_bias[2 * g] = s.v_bias[2 * g + 1] = 0;
    }
    std::memset(s.acc, 0, sizeof(float) * static_cast<size_t>(s.group) * static_cast<size_t>(x.row));
  }

  static void tile(AttendGroup& s, const AttendTile& tile, const AttendTile* next) {
    State& state = *state_of(s);
    const Shape x(s.head_size);
    Ahead ahead = ahead_of(s);
    Unit unit{&tile, 0, 0};
    if (!state.scored) {
      prepare(s, x, state, unit, ahead);
      for (int i = 0; i < 2 * x.chunks; ++i) dot(x, state, i, ahead);
    }
    while (unit.tile == &tile) {
      Unit following = unit;
      if (++following.batch == batches(s)) {
        following.batch = 0;
        following.t0 += kStep;
        if (following.t0 >= tile.n) following = {next, 0, 0};
      }
      run(s, x, state, unit, following, ahead);
      unit = following;
    }
    ahead.finish(s);
  }

  static void end(AttendGroup& s, float* out) {
    State& state = *state_of(s);
    const Shape x(s.head_size);
    Ahead none;
    if (state.pending) {
      const Memory m = memory(s, x);
      multiply_all(x, state, m);
      add_values(s, x, state, m, none);
    }
    _tile_release();
    for (int g = 0; g < s.group; ++g) {
      const float* acc = s.acc + static_cast<int64_t>(g) * x.row;
      float* to = out + static_cast<int64_t>(g) * s.head_size;
      for (int h = 0; h < kHalves; ++h, to += x.part)
        natural(x, h, acc, bias_of(s, g / kLanes, h)[g % kLanes], to);
      s.max[g] *= kLn2;
    }
  }

 private:
  struct Unit {
    const AttendTile* tile;
    int t0, batch;
  };

  // What passes from one unit to the next, at the start of the group's working memory.
  struct alignas(64) State {
    bool scored;   // `sums` holds the scores of the next unit
    bool pending;  // `weights` are those of the last one, `batch` its queries
    int batch;
    vf steps, biases;  // of the folded queries
    const uint8_t *queries, *keys;
    int64_t key_row;
    __m512i sums[2][16];  // [16 tokens][8 sums of high bytes, 8 of low bytes]
    typename IntQuery<E>::Scales scales;
    uint8_t weights[kHalves][16 * 32];
    float weight_steps[kHalves][16];
  };
  static_assert(sizeof(State) <= kFoldExtra);
  static State* state_of(const AttendGroup& s) { return reinterpret_cast<State*>(s.fold); }

  // Then: queries' tiles, unpacked keys and values (kStep rows each), packed values, their products.
  struct Memory {
    uint8_t *queries, *keys, *values, *packed;
    int32_t* products;
  };
  static Memory memory(const AttendGroup& s, const Shape& x) {
    uint8_t* at = reinterpret_cast<uint8_t*>(state_of(s) + 1);
    return {at, at + 16 * x.row, at + 48 * x.row, at + 80 * x.row,
            reinterpret_cast<int32_t*>(at + 112 * x.row)};
  }
  // [batch][half][8]
  static float* bias_of(const AttendGroup& s, int batch, int half) {
    return s.v_bias + (2 * batch + half) * kLanes;
  }

  // One half of a query's sums in natural order. A chunk of one half has its channels in 4 x 4 groups of
  // four, columns first.
  static void natural(const Shape& x, int half, const float* acc, float bias, float* to) {
    int chunk = half * x.room / 64, o = half * x.room % 64;
    for (int d = 0; d < x.part;) {
      if (o == 0 && !x.mixed(chunk)) {
        vf y[4];
        for (int j = 0; j < 4; ++j) y[j] = vadd(vload(acc + chunk * 64 + j * 16), vset(bias));
        const vf low01 = _mm512_shuffle_f32x4(y[0], y[1], 0x44),
                 low23 = _mm512_shuffle_f32x4(y[2], y[3], 0x44);
        const vf high01 = _mm512_shuffle_f32x4(y[0], y[1], 0xee),
                 high23 = _mm512_shuffle_f32x4(y[2], y[3], 0xee);
        y[0] = _mm512_shuffle_f32x4(low01, low23, 0x88);
        y[1] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
        y[2] = _mm512_shuffle_f32x4(high01, high23, 0x88);
        y[3] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
        for (int a = 0; a < 4 && d < x.part; ++a, d += W) {
          _mm512_mask_storeu_ps(to + d, first_lanes(x.part - d), y[a]);
        }
        ++chunk;
        continue;
      }
      to[d++] = acc[chunk * 64 + x.place(chunk, o)] + bias;
      if (++o == 64) {
        o = 0;
        ++chunk;
      }
    }
  }

  static int tokens(const Unit& u) { return u.tile->n - u.t0 < kStep ? u.tile->n - u.t0 : kStep; }
  static bool whole(const Shape& x, const Unit& u) { return tokens(u) == kStep && x.part % 64 == 0; }
  static bool few(const AttendGroup& s) { return s.group <= 4; }
  static bool plain(const AttendGroup& s) { return s.softcap == 0 && !s.weights; }

  // Queries folded and keys as bytes for unit u, and meanwhile the products of the pending one.
  static void prepare(const AttendGroup& s, const Shape& x, State& state, const Unit& u, Ahead& next) {
    const Memory m = memory(s, x);
    const float scale = plain(s) ? s.scale * kLog2E : s.scale;
    IntQuery<E>::widen(s, x, u.batch, *u.tile, state.scales);
    int loaded = -1;
    publish();
    IntQuery<E>::fold(s, x, u.batch, state.scales, scale, m.queries, state.steps, state.biases, next,
                      [&](int i) {
                        if (state.pending)
                          Values::multiply(x, state.weights, m.packed, i, loaded, m.products);
                      });
    state.queries = m.queries;
    if (!Shape::kFour && whole(x, u)) {
      state.keys = u.tile->k + u.t0 * u.tile->k_stride;
      state.key_row = u.tile->k_stride;
      return;
    }
    if (u.batch == 0) unpack(x, u.tile->k + u.t0 * u.tile->k_stride, u.tile->k_stride, tokens(u), m.keys);
    state.keys = m.keys;
    state.key_row = x.row;
  }

  static void multiply_all(const Shape& x, const State& state, const Memory& m) {
    int loaded = -1;
    publish();
    for (int i = 0; i < 4 * x.chunks; ++i) {
      Values::multiply(x, state.weights, m.packed, i, loaded, m.products);
    }
  }

  static void run(AttendGroup& s, const Shape& x, State& state, const Unit& u, const Unit& following,
                  Ahead& next) {
    const Memory m = memory(s, x);
    const AttendTile& tile = *u.tile;
    const int n = tokens(u), g0 = u.batch * kLanes;
    vf scores[16];
    finish_scores(state.sums, state.steps, state.biases, scores);
    if (following.tile) {
      prepare(s, x, state, following, next);
    } else if (state.pending) {
      multiply_all(x, state, m);
    }
    if (!plain(s)) cap_and_keep(s, g0, scores, n, tile.token0 + u.t0);
    SoftmaxStep softmax;
    softmax.start(scores, n, s.max + g0);
    if (state.pending) add_values(s, x, state, m, next);
    publish();
    int scored = 0;
    for (int t = 0; t < 16; t += 4) {
      for (; following.tile && 4 * scored < (t / 4 + 1) * 2 * x.chunks; ++scored) dot(x, state, scored, next);
      softmax.exponentials(scores, t);
      next.step<4>();
    }
    state.scored = following.tile;
    vf factor;
    if (softmax.finish(s.max + g0, s.sum + g0, factor)) grow(s, x, u.batch, factor);
    for (int h = 0; h < kHalves; ++h) {
      vf bias;
      weigh(scores, n, tile.v_scale + h * tile.v_group_stride + u.t0,
            tile.v_min + h * tile.v_group_stride + u.t0, few(s), state.weights[h], state.weight_steps[h],
            bias, next);
      float* sum = bias_of(s, u.batch, h);
      _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), _mm512_castps512_ps256(bias)));
    }
    stay_awake();
    // The pending products are done with the packed values of the step before.
    if (u.batch == 0) pack_values(x, u, m, next);
    state.batch = u.batch;
    state.pending = true;
  }

  // Earlier sums of a batch under a new maximum.
  static void grow(AttendGroup& s, const Shape& x, int batch, vf factor) {
    alignas(64) float lane[16];
    vstore(lane, factor);
    for (int g = 0; g < kLanes && batch * kLanes + g < s.group; ++g) {
      if (lane[g] == 1.0f) continue;
      float* acc = s.acc + static_cast<int64_t>(batch * kLanes + g) * x.row;
      for (int d = 0; d < x.row; d += W) vstore(acc + d, vmul(vload(acc + d), vset(lane[g])));
      for (int h = 0; h < kHalves; ++h) bias_of(s, batch, h)[g] *= lane[g];
    }
  }

  static __m512i load_part(const uint8_t* p, int left) {
    return left >= 64  ? _mm512_loadu_si512(p)
           : left <= 0 ? _mm512_setzero_si512()
                       : _mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, p);
  }

  // kStep rows of codes as bytes, half after half, zero beyond the half and beyond row n.
  static void unpack(const Shape& x, const uint8_t* from, int64_t stride, int n, uint8_t* to) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const bool full = n == kStep && x.part % 64 == 0;
    for (int t = 0; t < kStep; ++t, from += stride, to += x.row) {
      for (int c = 0; c < x.room; c += 64) {
        const __m512i y = full    ? _mm512_loadu_si512(from + c)
                          : t < n ? load_part(from + c, x.part - c)
                                  : _mm512_setzero_si512();
        if constexpr (!Shape::kFour) {
          _mm512_store_si512(to + c, y);
        } else if (full || x.room - c >= 64) {
          _mm512_storeu_si512(to + c, _mm512_and_si512(y, nibble));
          _mm512_storeu_si512(to + x.room + c, _mm512_and_si512(_mm512_srli_epi16(y, 4), nibble));
        } else {
          const __m256i low = _mm512_castsi512_si256(y), mask = _mm512_castsi512_si256(nibble);
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + c), _mm256_and_si256(low, mask));
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + x.room + c),
                             _mm256_and_si256(_mm256_srli_epi16(low, 4), mask));
        }
      }
    }
  }

  static void pack_values(const Shape& x, const Unit& u, const Memory& m, Ahead& next) {
    const uint8_t* v = u.tile->v + u.t0 * u.tile->v_stride;
    if (!whole(x, u)) {
      unpack(x, v, u.tile->v_stride, tokens(u), m.values);
      Values::pack(x, m.values, x.row, m.packed, next);
    } else if constexpr (Shape::kFour) {
      Values::pack_nibbles(x, v, u.tile->v_stride, m.packed, next);
    } else {
      Values::pack(x, v, u.tile->v_stride, m.packed, next);
    }
  }

  // The i-th multiplication of the prepared unit's scores, of 2 * chunks.
  static void dot(const Shape& x, State& state, int i, Ahead& next) {
    const int c = i / 2;
    if (i == 0) {
      publish();
      _tile_zero(0);
      _tile_zero(1);
    }
    if (i % 2 == 0) {
      _tile_loadd(5, state.queries + 1024 * c, 64);
      _tile_loadd(4, state.keys + 64 * c, state.key_row);
      _tile_dpbusd(0, 4, 5);
    } else {
      _tile_loadd(4, state.keys + 16 * state.key_row + 64 * c, state.key_row);
      _tile_dpbusd(1, 4, 5);
    }
    next.step<4>();
    if (i + 1 < 2 * x.chunks) return;
    _tile_stored(0, state.sums[0], 64);
    _tile_stored(1, state.sums[1], 64);
  }

  static void finish_scores(const __m512i (*sums)[16], vf steps, vf biases, vf* scores) {
    publish();
#pragma GCC unroll 4
    for (int t = 0; t < 16; ++t) {
      const vf high = _mm512_cvtepi32_ps(_mm512_shuffle_i64x2(sums[0][t], sums[1][t], 0x44));
      const vf low = _mm512_cvtepi32_ps(_mm512_shuffle_i64x2(sums[0][t], sums[1][t], 0xee));
      scores[t] = vfma(vfma(high, vset(256.0f), low), steps, biases);
    }
  }

  static void add_values(AttendGroup& s, const Shape& x, State& state, const Memory& m, Ahead& next) {
    const int g0 = state.batch * kLanes, left = s.group - g0;
    publish();
    Values::add(x, left < kLanes ? left : kLanes, m.products, state.weight_steps,
                s.acc + static_cast<int64_t>(g0) * x.row, few(s), next);
    state.pending = false;
  }
};

}  // namespace
}  // namespace coattn::amx
