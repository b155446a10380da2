// bf16 queries over bf16 keys and values with tiles, 8 queries at a time.
//
// Scores: A = 16 keys x 32 channels as they lie, B = channel pairs x queries, packed once per call.
//
// Values: a tile multiplies pairs of tokens, and rows of values are pairs of channels. Instead of
// interleaving two rows of values, each weight is paired with a zero: with the zero second, value rows as
// they lie give the sums of the even channels, with the zero first those of the odd ones. That is twice the
// multiplications, which the tile unit does beside the vector code, and no work on the values at all.
//
// A weight is split into two bf16 (high and low part, 2^-17 of it lost): rows 0..7 and 8..15 of a tile, added
// at the end. Up to four queries leave room for the odd channels in the same tile: four rows each of even
// high, even low, odd high and odd low.
//
// The values of a unit (32 tokens, 8 queries) are added while the next one is scored: what vector code wrote
// can be loaded into a tile only some time later.
namespace coattn::amx {
namespace {

struct Bf16 {
  static int batches(const AttendGroup& s) { return (s.group + kLanes - 1) / kLanes; }

  static void begin(AttendGroup& s) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = 16;
      config.bytes[i] = 64;
    }
    configure(config);
    for (int b = 0; b < batches(s); ++b) pack_queries(s, b);
    for (int g = 0; g < batches(s) * kLanes; ++g) {
      s.max[g] = -__builtin_inff();
      s.sum[g] = 0;
    }
    std::memset(s.acc, 0, sizeof(float) * static_cast<size_t>(batches(s) * 16 * s.stride));
    State& state = *state_of(s);
    state.pending = state.scored = false;
    state.turn = 0;
    // The odd tiles start two bytes before the even ones.
    std::memset(state.before, 0, sizeof(state.before));
  }

  static void tile(AttendGroup& s, const AttendTile& tile, const AttendTile* next) {
    State& state = *state_of(s);
    Ahead ahead = ahead_of(s);
    Unit unit{&tile, 0, 0};
    if (!state.scored) dot(s, unit, state.sums, ahead);
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
    ahead.finish(s);
  }

  static void end(AttendGroup& s, float* out) {
    State& state = *state_of(s);
    if (state.pending) {
      Ahead none;
      load_weights(s, state);
      for (int c = 0; c < s.stride / 32; ++c) add_values(s, state, c, none);
    }
    _tile_release();
    // Sums of even and of odd channels, high and low parts: back to natural order, 32 channels at a time.
    const int odd = few(s) ? 8 * 16 : 256, low = few(s) ? 4 * 16 : 8 * 16;
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int g = 0; g < s.group; ++g) {
      const float* acc = acc_of(s, g / kLanes) + g % kLanes * 16;
      float* to = out + static_cast<int64_t>(g) * s.head_size;
      for (int d = 0; d < s.head_size; d += 32, acc += chunk_floats(s)) {
        const vf even = vadd(vload(acc), vload(acc + low)),
                 odds = vadd(vload(acc + odd), vload(acc + odd + low));
        const int left = s.head_size - d;
        _mm512_mask_storeu_ps(to + d, first_lanes(left), _mm512_permutex2var_ps(even, first, odds));
        if (left > 16) {
          _mm512_mask_storeu_ps(to + d + 16, first_lanes(left - 16),
                                _mm512_permutex2var_ps(even, second, odds));
        }
      }
      s.max[g] *= kLn2;
    }
  }

 private:
  struct Unit {
    const AttendTile* tile;
    int t0, batch;
  };
  struct Rows {
    const uint8_t* at;
    int64_t stride;
  };

  // What passes from one unit to the next, at the start of the group's working memory; then padded copies of
  // keys and, twice, of values, kStep rows each.
  struct alignas(64) State {
    bool scored;   // `sums` holds the scores of the next unit
    bool pending;  // `weights` and `values` are those of the last one
    int batch, turn;
    Rows values;
    alignas(64) uint8_t before[64];
    __m512i weights[2][16];  // [16 tokens][8 high parts, 8 low parts], a bf16 and a zero each
    vf sums[kStep];
  };
  static_assert(sizeof(State) <= kFoldExtra);
  static State* state_of(const AttendGroup& s) { return reinterpret_cast<State*>(s.fold); }

  static int tokens(const Unit& u) { return u.tile->n - u.t0 < kStep ? u.tile->n - u.t0 : kStep; }

  // kStep whole rows: as they lie, or padded in the i-th buffer.
  static Rows whole_rows(const AttendGroup& s, const Unit& u, const uint8_t* from, int64_t stride, int i) {
    const int n = tokens(u), padded = 2 * s.stride;
    from += u.t0 * stride;
    if (n == kStep && s.head_size % 32 == 0) return {from, stride};
    uint8_t* to = reinterpret_cast<uint8_t*>(state_of(s) + 1) + i * kStep * padded;
    pad_rows(from, stride, n, 2 * s.head_size, to, padded);
    return {to, padded};
  }

  static bool few(const AttendGroup& s) { return s.group <= 4; }
  static int chunk_floats(const AttendGroup& s) { return few(s) ? 256 : 512; }

  // [chunk of 32 channels][even, odd][8 high parts, 8 low parts][16], or [chunk][16][16] for few queries.
  static float* acc_of(const AttendGroup& s, int batch) {
    return s.acc + static_cast<int64_t>(batch) * 16 * s.stride;
  }

  // prep of one batch: [chunk][16 channel pairs][16 queries][2], of which the last 8 are zero.
  static void pack_queries(AttendGroup& s, int batch) {
    uint16_t* prep = reinterpret_cast<uint16_t*>(s.prep) + static_cast<int64_t>(batch) * s.stride * 16;
    for (int c = 0; c < s.stride / 32; ++c) {
      __m512i x[16];
      for (int g = 0; g < 16; ++g) {
        x[g] = _mm512_setzero_si512();
        if (g < kLanes && batch * kLanes + g < s.group) {
          const float* q = s.q + static_cast<int64_t>(batch * kLanes + g) * s.stride + 32 * c;
          x[g] = _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(vload(q))), to_bf16(vload(q + 16)), 1);
        }
      }
      transpose(x);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(prep + (c * 16 + i) * 32, x[i]);
    }
  }

  // Scores of unit u.
  static void dot(const AttendGroup& s, const Unit& u, vf* sums, Ahead& next) {
    const Rows k = whole_rows(s, u, u.tile->k, u.tile->k_stride, 0);
    const uint16_t* q = reinterpret_cast<uint16_t*>(s.prep) + static_cast<int64_t>(u.batch) * s.stride * 16;
    publish();
    _tile_zero(0);
    _tile_zero(1);
    for (int c = 0; c < s.stride / 32; ++c) {
      _tile_loadd(4, q + c * 512, 64);
      next.step<4>();
      _tile_loadd(2, k.at + c * 64, k.stride);
      next.step<4>();
      _tile_loadd(3, k.at + 16 * k.stride + c * 64, k.stride);
      next.step<4>();
      _tile_dpbf16ps(0, 2, 4);
      next.step<4>();
      _tile_dpbf16ps(1, 3, 4);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 16, 64);
  }

  // The weights of unit u, while the tiles score the one after it and add the values of the one before.
  static void run(AttendGroup& s, State& state, const Unit& u, const Unit& following, Ahead& next) {
    const bool plain = s.softcap == 0 && !s.weights;
    const int n = tokens(u), g0 = u.batch * kLanes, chunks = s.stride / 32;
    const vf scale = vset(plain ? s.scale * kLog2E : s.scale);
    vf x[16], factor;
    publish();
#pragma GCC unroll 4
    for (int t = 0; t < 16; ++t) {
      x[t] = vmul(_mm512_shuffle_f32x4(state.sums[t], state.sums[t + 16], 0x44), scale);
    }
    publish();
    state.scored = following.tile;
    if (following.tile) dot(s, following, state.sums, next);
    next.step<8>();
    if (!plain) cap_and_keep(s, g0, x, n, u.tile->token0 + u.t0);
    SoftmaxStep softmax;
    softmax.start(x, n, s.max + g0);
    next.step<8>();
    if (state.pending) load_weights(s, state);
    int done = 0;
    for (int t = 0; t < 16; t += 4) {
      for (; state.pending && 4 * done < (t / 4 + 1) * chunks; ++done) add_values(s, state, done, next);
      softmax.exponentials(x, t);
      next.step<8>();
      next.step<8>();
    }
    if (softmax.finish(s.max + g0, s.sum + g0, factor)) grow(s, u.batch, factor);
    split(x, few(s), state.weights, next);
    if (u.batch == 0) {
      state.turn ^= 1;
      state.values = whole_rows(s, u, u.tile->v, u.tile->v_stride, 1 + state.turn);
    }
    state.batch = u.batch;
    state.pending = true;
  }

  static void grow(AttendGroup& s, int batch, vf factor) {
    alignas(64) float lane[16];
    vstore(lane, factor);
    const int rows = s.stride / 32 * chunk_floats(s) / 16, mask = few(s) ? 3 : 7;
    float* at = acc_of(s, batch);
    for (int r = 0; r < rows; ++r, at += 16) vstore(at, vmul(vload(at), vset(lane[r & mask])));
  }

  // Both parts of a weight in one word; then, for each half of the tokens, rows of high and of low parts.
  static void split(const vf* p, bool few, __m512i (*to)[16], Ahead& next) {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
    __m512i x[16];
#pragma GCC unroll 4
    for (int t = 0; t < 16; ++t) {
      const __m512i high = _mm512_and_si512(_mm512_castps_si512(p[t]), top);
      const vf rest = vsub(p[t], _mm512_castsi512_ps(high));
      const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(rest), half), 16);
      x[t] = _mm512_or_si512(high, low);
      next.step<4>();
    }
    transpose(x);
    if (few) {
      for (int g = 0; g < 16; ++g) {
        if (g % 8 >= 4) continue;
        __m512i* rows = to[g / 8] + g % 8;
        rows[0] = _mm512_srli_epi32(x[g], 16);
        rows[4] = _mm512_andnot_si512(top, x[g]);
        rows[8] = _mm512_and_si512(top, x[g]);
        rows[12] = _mm512_slli_epi32(x[g], 16);
      }
      return;
    }
#pragma GCC unroll 8
    for (int g = 0; g < 16; ++g) {
      to[g / 8][g % 8] = _mm512_srli_epi32(x[g], 16);
      to[g / 8][8 + g % 8] = _mm512_andnot_si512(top, x[g]);
    }
  }

  static void load_weights(const AttendGroup& s, const State& state) {
    const uint8_t *even = reinterpret_cast<const uint8_t*>(state.weights), *odd = even - 2;
    publish();
    _tile_loadd(4, even, 64);
    _tile_loadd(5, even + 1024, 64);
    if (few(s)) return;
    _tile_loadd(6, odd, 64);
    _tile_loadd(7, odd + 1024, 64);
  }

  // acc += weights . values of the pending unit, chunk c of 32 channels.
  static void add_values(AttendGroup& s, const State& state, int c, Ahead& next) {
    const Rows& v = state.values;
    float* acc = acc_of(s, state.batch) + chunk_floats(s) * c;
    _tile_loadd(0, acc, 64);
    next.step<4>();
    _tile_loadd(2, v.at + 64 * c, v.stride);
    next.step<4>();
    _tile_loadd(3, v.at + 16 * v.stride + 64 * c, v.stride);
    next.step<4>();
    _tile_dpbf16ps(0, 4, 2);
    next.step<4>();
    _tile_dpbf16ps(0, 5, 3);
    _tile_stored(0, acc, 64);
    if (few(s)) return;
    _tile_loadd(1, acc + 256, 64);
    _tile_dpbf16ps(1, 6, 2);
    _tile_dpbf16ps(1, 7, 3);
    _tile_stored(1, acc + 256, 64);
  }
};

}  // namespace
}  // namespace coattn::amx
