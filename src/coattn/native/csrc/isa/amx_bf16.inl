// bf16 queries over bf16 keys and values with tiles, 8 queries at a time.
//
// Scores: A = 16 keys x 32 channels as they lie, B = channel pairs x queries, packed once per call.
//
// Values: a tile multiplies pairs of tokens, and rows of values are pairs of channels. Instead of
// interleaving two rows of values, a weight meets a pair of channels twice: (w, 0) gives sums of the even
// channels, (0, w) of the odd ones. That is twice the multiplications, which the tile unit does beside the
// vector code, and no work on the values at all.
//
// A weight is split into two bf16, high + low, with 2^-16 of it lost. Up to five queries have both parts in
// one tile, three rows a query, since (high, -low) + (low, low) = (w, 0) and (low, low) + (-low, high) = (0,
// w): their sums are kept apart and added at the end. Eight queries have a tile of high and one of low parts,
// 8 rows (w, 0) and 8 rows (0, w) each, which are added to the same sums.
//
// The values of a unit (32 tokens, a batch of queries) are added while the next one is scored: what vector
// code wrote can be loaded into a tile only some time later.
//
// Tiles: 0, 1 scores, then 0 sums, 2 keys or values, 4 queries, then 4, 5 weights and 1, 3 low parts of eight
// queries. The fewer, the better beside a busy hyper-thread: docs/log/kernels.md.
namespace coattn::amx {
namespace {

// Up to 4 or 8 queries (see amx_softmax.inl), tokens so that few shuffles transpose them into rows.
template <int Queries>
struct Quads {
  static constexpr int kQueries = Queries, kSlots = 16 / Queries;
  static constexpr int token(int t, int slot) { return t / 4 * 4 * kSlots + 4 * slot + t % 4; }
};

struct Bf16 {
  static constexpr int kTiles = 6;

  static int batches(const AttendGroup& s) { return (s.group + kLanes - 1) / kLanes; }

  static void begin(AttendGroup& s) {
    TileConfig config;
    for (int i = 0; i < kTiles; ++i) {
      config.rows[i] = 16;
      config.bytes[i] = 64;
    }
    configure(config);
    for (int g = 0; g < s.group; g += 16) pack_queries(s, g);
    for (int g = 0; g < batches(s) * kLanes; ++g) {
      s.max[g] = -__builtin_inff();
      s.sum[g] = 0;
    }
    std::memset(s.acc, 0, sizeof(float) * static_cast<size_t>(batches(s) * 8 * s.stride));
    State& state = *state_of(s);
    state.pending = state.scored = false;
    state.turn = state.batch = 0;
    state.values = {};
    std::memset(state.weights, 0, sizeof(state.weights));
  }

  static void tile(AttendGroup& s, const AttendTile& tile, const AttendTile* next) {
    s.group <= 4 ? units<4>(s, tile, next) : units<8>(s, tile, next);
  }

  static void end(AttendGroup& s, float* out) {
    const State& state = *state_of(s);
    if (state.pending) {
      Ahead none;
      Add add(s, state);
      add.load_weights(state);
      for (int c = 0; c < s.stride / 32; ++c) add.chunk(none);
    }
    _tile_release();
    // Even and odd channels back to natural order, 32 at a time.
    const int part = 16 * queries(s);
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int g = 0; g < s.group; ++g) {
      const float* acc = acc_of(s, g / kLanes) + g % kLanes * 16;
      float* to = out + static_cast<int64_t>(g) * s.head_size;
      for (int d = 0; d < s.head_size; d += 32, acc += 256) {
        vf even = vload(acc), odd = vload(acc + part);
        if (joint(s)) {
          even = vadd(even, odd);
          odd = vadd(odd, vload(acc + 2 * part));
        }
        const int left = s.head_size - d;
        _mm512_mask_storeu_ps(to + d, first_lanes(left), _mm512_permutex2var_ps(even, first, odd));
        if (left > 16) {
          _mm512_mask_storeu_ps(to + d + 16, first_lanes(left - 16),
                                _mm512_permutex2var_ps(even, second, odd));
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
    __m512i weights[2][32];  // [16 tokens][3 or 4][queries], pairs of bf16
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

  // Whether both parts of the weights are in one tile.
  static bool joint(const AttendGroup& s) { return s.group <= 5; }
  static int queries(const AttendGroup& s) { return joint(s) ? s.group : kLanes; }

  // [chunk of 32 channels][16 rows: 3 or 2 a query][16]
  static float* acc_of(const AttendGroup& s, int batch) {
    return s.acc + static_cast<int64_t>(batch) * 8 * s.stride;
  }

  // prep of 16 queries: [chunk][16 channel pairs][16 queries][2].
  static void pack_queries(AttendGroup& s, int g0) {
    uint16_t* prep = reinterpret_cast<uint16_t*>(s.prep) + static_cast<int64_t>(g0) * s.stride;
    for (int c = 0; c < s.stride / 32; ++c) {
      __m512i x[16];
      for (int g = 0; g < 16; ++g) {
        x[g] = _mm512_setzero_si512();
        if (g0 + g < s.group) {
          const float* q = s.q + static_cast<int64_t>(g0 + g) * s.stride + 32 * c;
          x[g] = _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(vload(q))), to_bf16(vload(q + 16)), 1);
        }
      }
      transpose(x);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(prep + (c * 16 + i) * 32, x[i]);
    }
  }

  template <int Queries>
  static void units(AttendGroup& s, const AttendTile& tile, const AttendTile* next) {
    State& state = *state_of(s);
    Ahead ahead = ahead_of(s);
    Unit unit{&tile, 0, 0};
    if (!state.scored) {
      Dot dot(s, unit);
      for (int c = 0; c < s.stride / 32; ++c) dot.add(ahead);
      dot.keep(state.sums);
    }
    while (unit.tile == &tile) {
      Unit following = unit;
      if (++following.batch == batches(s)) {
        following.batch = 0;
        following.t0 += kStep;
        if (following.t0 >= tile.n) following = {next, 0, 0};
      }
      run<Queries>(s, state, unit, following, ahead);
      unit = following;
    }
    ahead.finish(s);
  }

  // Scores of unit u and of the next batch.
  struct Dot {
    const uint8_t *first, *second, *q;
    int64_t stride;

    Dot(const AttendGroup& s, const Unit& u) {
      const Rows k = whole_rows(s, u, u.tile->k, u.tile->stride, 0);
      first = k.at;
      second = k.at + 16 * k.stride;
      stride = k.stride;
      q = reinterpret_cast<const uint8_t*>(s.prep) + static_cast<int64_t>(u.batch / 2) * s.stride * 32;
      publish();
      _tile_zero(0);
      _tile_zero(1);
    }
    // The next chunk of 32 channels.
    void add(Ahead& next) {
      _tile_loadd(4, q, 64);
      next.step<4>();
      _tile_loadd(2, first, stride);
      next.step<4>();
      _tile_dpbf16ps(0, 2, 4);
      next.step<4>();
      _tile_loadd(2, second, stride);
      next.step<4>();
      _tile_dpbf16ps(1, 2, 4);
      q += 1024;
      first += 64;
      second += 64;
    }
    static void keep(vf* sums) {
      _tile_stored(0, sums, 64);
      _tile_stored(1, sums + 16, 64);
    }
  };

  // The weights of unit u, while the tiles score the one after it and add the values of the one before.
  template <int Queries>
  static void run(AttendGroup& s, State& state, const Unit& u, const Unit& following, Ahead& next) {
    using Order = Quads<Queries>;
    constexpr int kVectors = kStep / Order::kSlots;
    const bool plain = s.softcap == 0 && !s.weights;
    const int n = tokens(u), g0 = u.batch * kLanes, chunks = s.stride / 32;
    vf x[kVectors], factor;
    publish();
    read_scores<Queries>(state.sums, u.batch % 2 * kLanes, vset(plain ? s.scale * kLog2E : s.scale), x);
    publish();
    if (!plain) cap_and_keep<kVectors, Order>(s, g0, x, n, u.tile->token0 + u.t0);
    SoftmaxStep<kVectors, Order> softmax;
    state.scored = following.tile;
    if (following.tile && following.batch % 2 == 0) {
      Dot dot(s, following);
      for (int c = 0; c < chunks; ++c) dot.add(next);
      dot.keep(state.sums);
    }
    softmax.start(x, n, s.max + g0);
    const int waiting = state.pending ? chunks : 0;
    Add add(s, state);
    if (state.pending) add.load_weights(state);
    int done = 0;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      for (; 4 * done < (i + 1) * waiting; ++done) add.chunk(next);
      softmax.template exponentials<kVectors / 4>(x, i * kVectors / 4);
      next.step<8>();
      next.step<8>();
    }
    if (softmax.finish(s.max + g0, s.sum + g0, factor)) grow(s, u.batch, factor);
    split<Queries>(x, queries(s), state.weights, next);
    if (u.batch == 0) {
      state.turn ^= 1;
      state.values = whole_rows(s, u, u.tile->v, u.tile->stride, 1 + state.turn);
    }
    state.batch = u.batch;
    state.pending = true;
  }

  template <int Queries>
  static void read_scores(const vf* sums, int lane, vf scale, vf* x) {
    using Order = Quads<Queries>;
#pragma GCC unroll 4
    for (int t = 0; t < kStep / Order::kSlots; ++t) {
      auto row = [&](int slot) {
        return reinterpret_cast<const float*>(sums + Order::token(t, slot)) + lane;
      };
      if constexpr (Queries == 8) {
        x[t] = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_load_ps(row(0))), _mm256_load_ps(row(1)), 1);
      } else {
        x[t] = _mm512_castps128_ps512(_mm_load_ps(row(0)));
        x[t] = _mm512_mask_broadcast_f32x4(x[t], 0x00f0, _mm_load_ps(row(1)));
        x[t] = _mm512_mask_broadcast_f32x4(x[t], 0x0f00, _mm_load_ps(row(2)));
        x[t] = _mm512_mask_broadcast_f32x4(x[t], 0xf000, _mm_load_ps(row(3)));
      }
      x[t] = vmul(x[t], scale);
    }
  }

  static void grow(AttendGroup& s, int batch, vf factor) {
    alignas(64) float lane[16];
    vstore(lane, factor);
    publish();
    float* at = acc_of(s, batch);
    for (int c = 0; c < s.stride / 32; ++c, at += 256) {
      for (int g = 0; g < queries(s); ++g) {
        for (int r = g; r < 16; r += queries(s)) vstore(at + 16 * r, vmul(vload(at + 16 * r), vset(lane[g])));
      }
    }
  }

  // Weights into rows.
  template <int Queries>
  static void split(const vf* p, int queries, __m512i (*to)[32], Ahead& next) {
    constexpr int kGroups = kStep / Quads<Queries>::kSlots / 4;
    __m512i x[4 * kGroups];
#pragma GCC unroll 4
    for (int i = 0; i < kGroups; ++i) {
      in_parts<Queries == 4 ? 8 : 4>(p + 4 * i, x + 4 * i, next);
      if constexpr (Queries == 4) {
        for (int g = 0; g < queries; ++g) put(x[4 * i + g], to[i] + g, queries);
      } else if (i % 2) {
#pragma GCC unroll 4
        for (int g = 0; g < 4; ++g) {
          const __m512i a = x[4 * i - 4 + g], b = x[4 * i + g];
          put(_mm512_shuffle_i32x4(a, b, 0x88), to[i / 2] + g, queries);
          if (4 + g < queries) put(_mm512_shuffle_i32x4(a, b, 0xdd), to[i / 2] + 4 + g, queries);
        }
      }
    }
  }

  // Both parts of a weight in one word, and four vectors transposed within their 128 bits.
  template <int Steps>
  static void in_parts(const vf* p, __m512i* x, Ahead& next) {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u)), half = _mm512_set1_epi32(0x8000);
    __m512i y[4];
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const __m512i high = _mm512_and_si512(_mm512_castps_si512(p[t]), top);
      const vf rest = vsub(p[t], _mm512_castsi512_ps(high));
      const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(rest), half), 16);
      y[t] = _mm512_or_si512(high, low);
      next.step<Steps>();
    }
    const __m512i a = _mm512_unpacklo_epi32(y[0], y[1]), b = _mm512_unpackhi_epi32(y[0], y[1]);
    const __m512i c = _mm512_unpacklo_epi32(y[2], y[3]), d = _mm512_unpackhi_epi32(y[2], y[3]);
    x[0] = _mm512_unpacklo_epi64(a, c);
    x[1] = _mm512_unpackhi_epi64(a, c);
    x[2] = _mm512_unpacklo_epi64(b, d);
    x[3] = _mm512_unpackhi_epi64(b, d);
  }

  // The rows of one query's weights.
  static void put(__m512i x, __m512i* row, int queries) {
    const __m512i top = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    if (queries == kLanes) {
      row[0] = _mm512_srli_epi32(x, 16);
      row[kLanes] = _mm512_and_si512(top, x);
      row[2 * kLanes] = _mm512_andnot_si512(top, x);
      row[3 * kLanes] = _mm512_slli_epi32(x, 16);
      return;
    }
    row[0] = _mm512_xor_si512(_mm512_rol_epi32(x, 16), _mm512_set1_epi32(static_cast<int>(0x80000000u)));
    row[queries] = choose(0xffff, x, _mm512_slli_epi32(x, 16));
    row[2 * queries] = _mm512_xor_si512(x, _mm512_set1_epi32(0x8000));
  }

  // acc += weights . values of the pending unit.
  struct Add {
    const uint8_t *first, *second;
    int64_t stride;
    float* acc;
    bool both;  // low parts in tiles of their own

    Add(const AttendGroup& s, const State& state) {
      first = state.values.at;
      stride = state.values.stride;
      second = first + 16 * stride;
      acc = acc_of(s, state.batch);
      both = !joint(s);
    }
    void load_weights(const State& state) const {
      publish();
      _tile_loadd(4, state.weights[0], 64);
      _tile_loadd(5, state.weights[1], 64);
      if (both) {
        _tile_loadd(1, state.weights[0] + 16, 64);
        _tile_loadd(3, state.weights[1] + 16, 64);
      }
      publish();
    }
    // The next chunk of 32 channels.
    void chunk(Ahead& next) {
      _tile_loadd(0, acc, 64);
      next.step<4>();
      _tile_loadd(2, first, stride);
      next.step<4>();
      _tile_dpbf16ps(0, 4, 2);
      if (both) _tile_dpbf16ps(0, 1, 2);
      next.step<4>();
      _tile_loadd(2, second, stride);
      next.step<4>();
      _tile_dpbf16ps(0, 5, 2);
      if (both) _tile_dpbf16ps(0, 3, 2);
      _tile_stored(0, acc, 64);
      acc += 256;
      first += 64;
      second += 64;
    }
  };
};

}  // namespace
}  // namespace coattn::amx
