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
    a = vload_u8(p);
    b = vload_u8(p + W);
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

// The bytes a later tile will need, asked for a few lines at a time between the arithmetic of this one: all
// at once would fill the line-fill buffers and stall it.
struct Ahead {
  const uint8_t *at = nullptr, *end = nullptr, *at2 = nullptr, *end2 = nullptr;
  template <int Lines>
  void step() {
    if (at < end) {
      for (int i = 0; i < Lines; ++i) __builtin_prefetch(at + 64 * i, 0, 2);
      at += 64 * Lines;
    } else {
      at = at2;
      end = end2;
      at2 = end2 = nullptr;
    }
  }
  void finish() {
    while (at < end || at2 < end2) step<4>();
  }
};

inline Ahead ahead_of(const AttendGroup& s) {
  return {s.fetch.at, s.fetch.end, s.fetch.at2, s.fetch.end2};
}

}  // namespace
}  // namespace coattn::COATTN_ISA
