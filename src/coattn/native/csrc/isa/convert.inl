// Rows of float types as float32, and rows to and from int8 blocks.
namespace coattn::COATTN_ISA {
namespace {

template <Elem From>
inline vf load_float(const void* p, int64_t i) {
  if constexpr (From == Elem::bf16) return vload_bf16(static_cast<const uint16_t*>(p) + i);
  return vload_f16(static_cast<const uint16_t*>(p) + i);
}

template <Elem From>
void widen_from(const void* src, float* dst, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) vstore(dst + i, load_float<From>(src, i));
  if (i < n) {
    alignas(64) uint16_t in[W] = {};
    alignas(64) float out[W];
    std::memcpy(in, static_cast<const uint16_t*>(src) + i, sizeof(uint16_t) * static_cast<size_t>(n - i));
    vstore(out, load_float<From>(in, 0));
    std::memcpy(dst + i, out, sizeof(float) * static_cast<size_t>(n - i));
  }
}

void widen(Elem from, const void* src, float* dst, int64_t n) {
  if (from == Elem::f32) {
    std::memcpy(dst, src, sizeof(float) * static_cast<size_t>(n));
  } else if (from == Elem::bf16) {
    widen_from<Elem::bf16>(src, dst, n);
  } else {
    widen_from<Elem::f16>(src, dst, n);
  }
}

// float16 neighbours: the scale must not be smaller and the minimum not larger than the exact one, or codes
// clip.
inline uint16_t f16_up(float x) {
  if (!(x < 65504.0f)) return 0x7bff;
  uint16_t h = f32_to_f16(x);
  if (f16_to_f32(h) < x)
    h = static_cast<uint16_t>((h & 0x8000u) ? (h == 0x8000u ? 0x0001u : h - 1u) : h + 1u);
  return h;
}
inline uint16_t f16_down(float x) {
  return static_cast<uint16_t>(f16_up(-x) ^ 0x8000u);
}

struct Range {
  float low, high;
};

constexpr float kLevels = 255.0f;  // codes are 0..kLevels

// Scale and minimum, as stored.
inline void fit(Range r, uint16_t& scale, uint16_t& low) {
  if (!(r.low <= r.high)) r = {0, 0};  // no finite value seen
  low = f16_down(r.low);
  scale = f16_up((r.high - f16_to_f32(low)) / kLevels);
}

// Codes of one row; scale and low per channel.
inline void encode(const float* x, const float* inverse, const float* low, int n, uint8_t* codes) {
  int i = 0;
  for (; i + W <= n; i += W) {
    const vf c = vround(vmul(vsub(vload(x + i), vload(low + i)), vload(inverse + i)));
    vstore_u8(codes + i, vmin(vmax(c, vzero()), vset(kLevels)));
  }
  for (; i < n; ++i) {
    const float c = __builtin_rintf((x[i] - low[i]) * inverse[i]);
    codes[i] = static_cast<uint8_t>(c > 0 ? (c < kLevels ? c : kLevels) : 0);
  }
}

constexpr int kMaxHead = 1024;

struct KeyScales {
  uint16_t* scale;
  uint16_t* low;
};
inline KeyScales key_scales(const BlockLayout& layout, uint8_t* block) {
  return {reinterpret_cast<uint16_t*>(block + layout.k_scale),
          reinterpret_cast<uint16_t*>(block + layout.k_min)};
}
// The same as floats.
inline void load_key_scales(const BlockLayout& layout, const uint8_t* block, float* scale, float* low) {
  widen_from<Elem::f16>(block + layout.k_scale, scale, layout.head_size);
  widen_from<Elem::f16>(block + layout.k_min, low, layout.head_size);
}

void key_range(const float* k, int n, int size, float* low, float* high) {
  for (int d = 0; d < size; ++d) {
    low[d] = __builtin_inff();
    high[d] = -__builtin_inff();
  }
  for (int t = 0; t < n; ++t) {
    const float* row = k + static_cast<int64_t>(t) * size;
    for (int d = 0; d < size; ++d) {
      low[d] = row[d] < low[d] ? row[d] : low[d];
      high[d] = row[d] > high[d] ? row[d] : high[d];
    }
  }
}

void held_keys(const BlockLayout& layout, const uint8_t* block, float* low, float* high) {
  load_key_scales(layout, block, high, low);
  for (int d = 0; d < layout.head_size; ++d) high[d] = low[d] + kLevels * high[d];
}

void fit_keys(const BlockLayout& layout, const float* low, const float* high, uint8_t* block) {
  const KeyScales s = key_scales(layout, block);
  for (int d = 0; d < layout.head_size; ++d) fit({low[d], high[d]}, s.scale[d], s.low[d]);
}

bool widen_keys(const BlockLayout& layout, const float* low, const float* high, bool only_ask,
                uint8_t* block) {
  const int size = layout.head_size;
  alignas(64) float scale[kMaxHead], base[kMaxHead];
  load_key_scales(layout, block, scale, base);
  const auto outside = [&](int d) {
    return (low[d] < base[d] - 0.5f * scale[d]) | (high[d] > base[d] + (kLevels + 0.5f) * scale[d]);
  };
  int count = 0;
  for (int d = 0; d < size; ++d) count += outside(d);
  if (only_ask || !count) return count > 0;
  const KeyScales s = key_scales(layout, block);
  for (int d = 0; d < size; ++d) {
    if (!outside(d)) continue;
    const float top = base[d] + kLevels * scale[d];
    fit({low[d] < base[d] ? low[d] : base[d], high[d] > top ? high[d] : top}, s.scale[d], s.low[d]);
  }
  return true;
}

void encode_keys(const BlockLayout& layout, const float* k, int first, int n, uint8_t* block) {
  const int size = layout.head_size;
  alignas(64) float low[kMaxHead], inverse[kMaxHead];
  load_key_scales(layout, block, inverse, low);
  for (int d = 0; d < size; ++d) inverse[d] = inverse[d] > 0 ? 1.0f / inverse[d] : 0.0f;
  for (int t = 0; t < n; ++t) {
    encode(k + static_cast<int64_t>(t) * size, inverse, low, size,
           block + layout.k + (first + t) * layout.k_stride);
  }
}

inline Range range_of(const float* x, int n) {
  constexpr int kLanes = 16;
  float low[kLanes], high[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    low[j] = __builtin_inff();
    high[j] = -__builtin_inff();
  }
  int d = 0;
  for (; d + kLanes <= n; d += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      low[j] = x[d + j] < low[j] ? x[d + j] : low[j];
      high[j] = x[d + j] > high[j] ? x[d + j] : high[j];
    }
  }
  Range r{low[0], high[0]};
  for (int j = 1; j < kLanes; ++j) {
    r.low = low[j] < r.low ? low[j] : r.low;
    r.high = high[j] > r.high ? high[j] : r.high;
  }
  for (; d < n; ++d) {
    r.low = x[d] < r.low ? x[d] : r.low;
    r.high = x[d] > r.high ? x[d] : r.high;
  }
  return r;
}

void encode_values(const BlockLayout& layout, const float* v, int first, int n, uint8_t* block) {
  const int size = layout.head_size;
  uint16_t* v_scale = reinterpret_cast<uint16_t*>(block + layout.v_scale);
  uint16_t* v_min = reinterpret_cast<uint16_t*>(block + layout.v_min);
  alignas(64) float low[kMaxHead], inverse[kMaxHead];
  for (int t = 0; t < n; ++t) {
    const float* x = v + static_cast<int64_t>(t) * size;
    const int at = first + t;
    fit(range_of(x, size), v_scale[at], v_min[at]);
    const float scale = f16_to_f32(v_scale[at]), base = f16_to_f32(v_min[at]);
    for (int d = 0; d < size; ++d) {
      inverse[d] = scale > 0 ? 1.0f / scale : 0.0f;
      low[d] = base;
    }
    encode(x, inverse, low, size, block + layout.v + at * layout.v_stride);
  }
}

void quantise(const BlockLayout& layout, const float* k, const float* v, int n, uint8_t* block) {
  alignas(64) float low[kMaxHead], high[kMaxHead];
  key_range(k, n, layout.head_size, low, high);
  fit_keys(layout, low, high, block);
  encode_keys(layout, k, 0, n, block);
  encode_values(layout, v, 0, n, block);
}

void read_row(const BlockLayout& layout, const uint8_t* block, int row, float* k, float* v) {
  const int size = layout.head_size;
  const uint8_t* k_row = block + layout.k + row * layout.k_stride;
  alignas(64) float scales[kMaxHead], lows[kMaxHead];
  load_key_scales(layout, block, scales, lows);
  for (int d = 0; d < size; ++d) k[d] = lows[d] + scales[d] * k_row[d];
  if (!v) return;
  const uint8_t* v_row = block + layout.v + row * layout.v_stride;
  const float scale = f16_to_f32(reinterpret_cast<const uint16_t*>(block + layout.v_scale)[row]);
  const float low = f16_to_f32(reinterpret_cast<const uint16_t*>(block + layout.v_min)[row]);
  for (int d = 0; d < size; ++d) v[d] = low + scale * v_row[d];
}

}  // namespace
}  // namespace coattn::COATTN_ISA
