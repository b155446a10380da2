// Reading rows of any element type as pairs of float vectors.
//
// A row is read in pairs of 2 W channels. Which channels end up in which lane is the element type's choice,
// the one that needs no shuffle ("pair order"): queries are put into that order once, sums are put back once.
namespace coattn::COATTN_ISA {
namespace {

template <Elem E>
inline constexpr int kPairBytes = E == Elem::f32    ? 8 * W
                                  : E == Elem::int8 ? 2 * W
                                  : E == Elem::int4 ? W
                                                    : 4 * W;

template <Elem E>
constexpr int full_pairs(int head_size) {
  return head_size / (2 * W);
}
template <Elem E>
constexpr int pairs(int head_size) {
  return (head_size + 2 * W - 1) / (2 * W);
}
// Bytes of the last, unfilled pair of a row.
template <Elem E>
constexpr int tail_size(int head_size) {
  return static_cast<int>(elem_bytes(E, head_size % (2 * W)));
}

// The channel in lane `lane` (0 .. 2 W - 1) of pair c, or -1 past the end of the row.
template <Elem E>
constexpr int channel(int head_size, int c, int lane) {
  if constexpr (E == Elem::int4) {
    const int j = c * W + lane % W;
    return j >= head_size / 2 ? -1 : lane < W ? j : j + head_size / 2;
  } else if constexpr (E == Elem::bf16) {
    const int j = 2 * W * c + 2 * (lane % W) + lane / W;
    return j >= head_size ? -1 : j;
  } else {
    const int j = 2 * W * c + lane;
    return j >= head_size ? -1 : j;
  }
}

template <Elem E>
inline void load_pair(const uint8_t* p, vf& a, vf& b) {
  if constexpr (E == Elem::f32) {
    a = vload(reinterpret_cast<const float*>(p));
    b = vload(reinterpret_cast<const float*>(p) + W);
  } else if constexpr (E == Elem::bf16) {
    load_pair_bf16(p, a, b);
  } else if constexpr (E == Elem::f16) {
    a = vload_f16(reinterpret_cast<const uint16_t*>(p));
    b = vload_f16(reinterpret_cast<const uint16_t*>(p) + W);
  } else if constexpr (E == Elem::int8) {
    load_pair_u8(p, a, b);
  } else {
    load_pair_u4(p, a, b);
  }
}

template <Elem E, bool Tail>
inline void load_pair(const uint8_t* p, int tail, vf& a, vf& b) {
  if constexpr (Tail) {
    alignas(64) uint8_t buffer[kPairBytes<E> < 64 ? 64 : kPairBytes<E>];
    copy_tail(buffer, p, tail, sizeof(buffer));
    load_pair<E>(buffer, a, b);
  } else {
    load_pair<E>(p, a, b);
  }
}

template <Elem E>
void to_pair_order(const float* natural, float* ordered, int head_size) {
  for (int c = 0; c < pairs<E>(head_size); ++c) {
    for (int lane = 0; lane < 2 * W; ++lane) {
      const int ch = channel<E>(head_size, c, lane);
      ordered[c * 2 * W + lane] = ch < 0 ? 0.0f : natural[ch];
    }
  }
}

template <Elem E>
void from_pair_order(const float* ordered, float* natural, int head_size) {
  for (int c = 0; c < pairs<E>(head_size); ++c) {
    for (int lane = 0; lane < 2 * W; ++lane) {
      const int ch = channel<E>(head_size, c, lane);
      if (ch >= 0) natural[ch] = ordered[c * 2 * W + lane];
    }
  }
}

// Rows at a fixed distance.
struct Strided {
  const uint8_t* base;
  int64_t stride;
  const uint8_t* operator[](int t) const { return base + t * stride; }
};

// Rows anywhere.
struct Gathered {
  const uint8_t* const* rows;
  const uint8_t* operator[](int t) const { return rows[t]; }
};

// The bytes a later tile will need, asked for evenly over the arithmetic of this one. Memory is read fastest
// that way: a core has 16 line-fill buffers and the L2 cache's own prefetcher runs ahead of a steady stream;
// a burst of prefetches fills the buffers and overtakes it (int8, head 128, 4 queries, one core, all lines of
// a block asked for at once: 1,600 ns a block instead of 900).
//
// How many steps a tile has was counted in the tile before; each asks for the line where its share of the
// bytes starts, if need be for one line twice. There is no branch in it.
inline constexpr uint8_t kNothingAhead[64] = {};

struct Ahead {
  const uint8_t *at = kNothingAhead, *last = kNothingAhead, *at2 = nullptr, *end2 = nullptr;
  int64_t stride = 0;
  int steps = 0;

  template <int Steps>
  void step() {
    const uint8_t* p = at;
    for (int i = 0; i < Steps; ++i) __builtin_prefetch(p + i * stride, 0, kAheadHint);
    p += Steps * stride;
    at = p < last ? p : last;
    steps += Steps;
  }

  // What is left, and the count for the next tile.
  void finish(AttendGroup& s) {
    for (; at < last; at += 64) __builtin_prefetch(at, 0, kAheadHint);
    for (; at2 < end2; at2 += 64) __builtin_prefetch(at2, 0, kAheadHint);
    s.steps = steps;
  }
};

inline Ahead ahead_of(const AttendGroup& s) {
  Ahead a;
  if (s.fetch.at < s.fetch.end) {
    a.at = s.fetch.at;
    a.last = s.fetch.end - 1;
    a.stride = s.steps > 0 ? (s.fetch.end - s.fetch.at + s.steps - 1) / s.steps : 64;
    if (a.stride > 64) a.stride = 64;
  }
  a.at2 = s.fetch.at2;
  a.end2 = s.fetch.end2;
  return a;
}

}  // namespace
}  // namespace coattn::COATTN_ISA
