// int8 keys and values with integer tiles: codes are multiplied as integers, scales are folded into
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

struct Int8 {
  static int batches(const AttendGroup& s) { return (s.group + kLanes - 1) / kLanes; }

  static void begin(AttendGroup& s) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = kRows;
      config.bytes[i] = kRowBytes;
    }
    // Weights and values meet over kStep tokens, a byte of a weight row each, four in a row of values.
    config.bytes[6] = kStep;
    config.rows[7] = kStep / 4;
    if (few(s)) config.rows[6] = config.rows[2] = 2 * queries_of(true);
    configure(config);
    const IntShape x(s.head_size);
    state_of(s)->scored = state_of(s)->pending = false;
    for (int b = 0; b < batches(s); ++b) IntQuery::begin(s, x, b);
    for (int g = 0; g < batches(s) * kLanes; ++g) {
      s.max[g] = -__builtin_inff();
      s.sum[g] = s.v_bias[g] = 0;
    }
    std::memset(s.acc, 0, sizeof(float) * static_cast<size_t>(s.group) * static_cast<size_t>(x.row));
  }

  static void tile(AttendGroup& s, const AttendTile& tile, const AttendTile* next) {
    State& state = *state_of(s);
    const IntShape x(s.head_size);
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
    const IntShape x(s.head_size);
    Ahead none;
    if (state.pending) {
      const Memory m = memory(s, x);
      multiply_all(x, state, m);
      add_values(s, x, state, m, none);
    }
    _tile_release();
    for (int g = 0; g < s.group; ++g) {
      natural(x, s.acc + static_cast<int64_t>(g) * x.row, s.v_bias[g],
              out + static_cast<int64_t>(g) * s.head_size);
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
    IntQuery::Scales scales;
    uint8_t weights[IntValues::kWeightBytes];
    float weight_steps[16];
  };
  static_assert(sizeof(State) <= kFoldExtra);
  static State* state_of(const AttendGroup& s) { return reinterpret_cast<State*>(s.fold); }

  // Then: queries' tiles, padded keys and values (kStep rows each), packed values, their products.
  struct Memory {
    uint8_t *queries, *keys, *values, *packed;
    int32_t* products;
  };
  static Memory memory(const AttendGroup& s, const IntShape& x) {
    uint8_t* at = reinterpret_cast<uint8_t*>(state_of(s) + 1);
    constexpr int kKeys = kRows, kValues = kKeys + kStep, kPacked = kValues + kStep,
                  kProducts = kPacked + kStep;
    static_assert(kProducts + 4 * IntValues::kQuarters * IntValues::kProducts / kChunk <= kFoldBytes);
    return {at, at + kKeys * x.row, at + kValues * x.row, at + kPacked * x.row,
            reinterpret_cast<int32_t*>(at + kProducts * x.row)};
  }

  // A query's sums in natural order: a chunk has its channels in 4 x 4 groups of four, columns first.
  static void natural(const IntShape& x, const float* acc, float bias, float* to) {
    for (int d = 0; d < x.size; acc += kChunk) {
      vf y[4];
      for (int j = 0; j < 4; ++j) y[j] = vadd(vload(acc + j * 16), vset(bias));
      const vf low01 = _mm512_shuffle_f32x4(y[0], y[1], 0x44), low23 = _mm512_shuffle_f32x4(y[2], y[3], 0x44);
      const vf high01 = _mm512_shuffle_f32x4(y[0], y[1], 0xee),
               high23 = _mm512_shuffle_f32x4(y[2], y[3], 0xee);
      y[0] = _mm512_shuffle_f32x4(low01, low23, 0x88);
      y[1] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
      y[2] = _mm512_shuffle_f32x4(high01, high23, 0x88);
      y[3] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
      for (int a = 0; a < 4 && d < x.size; ++a, d += W) {
        _mm512_mask_storeu_ps(to + d, first_lanes(x.size - d), y[a]);
      }
    }
  }

  static int tokens(const Unit& u) { return u.tile->n - u.t0 < kStep ? u.tile->n - u.t0 : kStep; }
  static bool whole(const IntShape& x, const Unit& u) { return tokens(u) == kStep && x.size == x.row; }
  static bool few(const AttendGroup& s) { return s.group <= 4; }
  static bool plain(const AttendGroup& s) { return s.softcap == 0 && !s.weights; }

  // Queries folded and keys as bytes for unit u, and meanwhile the products of the pending one.
  static void prepare(const AttendGroup& s, const IntShape& x, State& state, const Unit& u, Ahead& next) {
    const Memory m = memory(s, x);
    const float scale = plain(s) ? s.scale * kLog2E : s.scale;
    IntQuery::widen(s, x, u.batch, *u.tile, state.scales);
    publish();
    IntQuery::fold(s, x, u.batch, state.scales, scale, m.queries, state.steps, state.biases, next,
                   [&](int i) {
                     if (state.pending) IntValues::multiply(state.weights, m.packed, i, m.products);
                   });
    state.queries = m.queries;
    state.keys = u.tile->k + u.t0 * u.tile->stride;
    state.key_row = u.tile->stride;
    if (whole(x, u)) return;
    if (u.batch == 0) pad_rows(state.keys, state.key_row, tokens(u), x.size, m.keys, x.row);
    state.keys = m.keys;
    state.key_row = x.row;
  }

  static void multiply_all(const IntShape& x, const State& state, const Memory& m) {
    publish();
    for (int i = 0; i < IntValues::kQuarters * x.chunks; ++i) {
      IntValues::multiply(state.weights, m.packed, i, m.products);
    }
  }

  static void run(AttendGroup& s, const IntShape& x, State& state, const Unit& u, const Unit& following,
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
    vf bias;
    weigh(scores, n, tile.v_scale + u.t0, tile.v_min + u.t0, few(s), state.weights, state.weight_steps, bias,
          next);
    float* sum = s.v_bias + g0;
    _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), _mm512_castps512_ps256(bias)));
    stay_awake();
    // The pending products are done with the packed values of the step before.
    if (u.batch == 0) pack_values(x, u, m, next);
    state.batch = u.batch;
    state.pending = true;
  }

  // Earlier sums of a batch under a new maximum.
  static void grow(AttendGroup& s, const IntShape& x, int batch, vf factor) {
    alignas(64) float lane[16];
    vstore(lane, factor);
    for (int g = 0; g < kLanes && batch * kLanes + g < s.group; ++g) {
      if (lane[g] == 1.0f) continue;
      float* acc = s.acc + static_cast<int64_t>(batch * kLanes + g) * x.row;
      for (int d = 0; d < x.row; d += W) vstore(acc + d, vmul(vload(acc + d), vset(lane[g])));
      s.v_bias[batch * kLanes + g] *= lane[g];
    }
  }

  static void pack_values(const IntShape& x, const Unit& u, const Memory& m, Ahead& next) {
    const uint8_t* v = u.tile->v + u.t0 * u.tile->stride;
    if (whole(x, u)) {
      IntValues::pack(x, v, u.tile->stride, m.packed, next);
    } else {
      pad_rows(v, u.tile->stride, tokens(u), x.size, m.values, x.row);
      IntValues::pack(x, m.values, x.row, m.packed, next);
    }
  }

  // The i-th multiplication of the prepared unit's scores, of 2 * chunks.
  static void dot(const IntShape& x, State& state, int i, Ahead& next) {
    const int c = i / 2;
    if (i == 0) {
      publish();
      _tile_zero(0);
      _tile_zero(1);
    }
    if (i % 2 == 0) {
      _tile_loadd(5, state.queries + kTileBytes * c, kRowBytes);
      _tile_loadd(4, state.keys + kChunk * c, state.key_row);
      _tile_dpbusd(0, 4, 5);
    } else {
      _tile_loadd(4, state.keys + kRows * state.key_row + kChunk * c, state.key_row);
      _tile_dpbusd(1, 4, 5);
    }
    next.step<4>();
    if (i + 1 < 2 * x.chunks) return;
    _tile_stored(0, state.sums[0], kRowBytes);
    _tile_stored(1, state.sums[1], kRowBytes);
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

  static void add_values(AttendGroup& s, const IntShape& x, State& state, const Memory& m, Ahead& next) {
    const int g0 = state.batch * kLanes, left = s.group - g0;
    publish();
    IntValues::add(x, left < kLanes ? left : kLanes, m.products, state.weight_steps,
                   s.acc + static_cast<int64_t>(g0) * x.row, few(s), next);
    state.pending = false;
  }
};

}  // namespace
}  // namespace coattn::amx
