// Rows between element types, and blocks to and from int8 and int4.
namespace coattn::COATTN_ISA {
namespace {

inline vf load_float(Elem e, const void* p, int64_t i) {
  if (e == Elem::f32) return vload(static_cast<const float*>(p) + i);
  if (e == Elem::bf16) return vload_bf16(static_cast<const uint16_t*>(p) + i);
  return vload_f16(static_cast<const uint16_t*>(p) + i);
}
inline void store_float(Elem e, void* p, int64_t i, vf v) {
  if (e == Elem::f32) {
    vstore(static_cast<float*>(p) + i, v);
  } else if (e == Elem::bf16) {
    vstore_bf16(static_cast<uint16_t*>(p) + i, v);
  } else {
    vstore_f16(static_cast<uint16_t*>(p) + i, v);
  }
}

template <Elem From, Elem To>
void convert_loop(const void* src, void* dst, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store_float(To, dst, i, load_float(From, src, i));
  if (i < n) {
    alignas(64) uint8_t in[W * 4] = {}, out[W * 4];
    std::memcpy(in, static_cast<const uint8_t*>(src) + elem_bytes(From, i),
                static_cast<size_t>(elem_bytes(From, n - i)));
    store_float(To, out, 0, load_float(From, in, 0));
    std::memcpy(static_cast<uint8_t*>(dst) + elem_bytes(To, i), out,
                static_cast<size_t>(elem_bytes(To, n - i)));
  }
}

template <Elem From>
void convert_from(const void* src, Elem to, void* dst, int64_t n) {
  if (to == Elem::f32) return convert_loop<From, Elem::f32>(src, dst, n);
  if (to == Elem::bf16) return convert_loop<From, Elem::bf16>(src, dst, n);
  convert_loop<From, Elem::f16>(src, dst, n);
}

void convert(Elem from, const void* src, Elem to, void* dst, int64_t n) {
  if (from == to) {
    std::memcpy(dst, src, static_cast<size_t>(elem_bytes(from, n)));
  } else if (from == Elem::f32) {
    convert_from<Elem::f32>(src, to, dst, n);
  } else if (from == Elem::bf16) {
    convert_from<Elem::bf16>(src, to, dst, n);
  } else {
    convert_from<Elem::f16>(src, to, dst, n);
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

// Scale and minimum for codes 0..levels, as stored.
inline void fit(Range r, float levels, uint16_t& scale, uint16_t& low) {
  if (!(r.low <= r.high)) r = {0, 0};  // no finite value seen
  low = f16_down(r.low);
  scale = f16_up((r.high - f16_to_f32(low)) / levels);
}

// Codes of one row; scale and low per channel.
inline void encode(const float* x, const float* inverse, const float* low, float levels, int n,
                   uint8_t* codes) {
  int i = 0;
  for (; i + W <= n; i += W) {
    const vf c = vround(vmul(vsub(vload(x + i), vload(low + i)), vload(inverse + i)));
    vstore_u8(codes + i, vmin(vmax(c, vzero()), vset(levels)));
  }
  for (; i < n; ++i) {
    const float c = __builtin_rintf((x[i] - low[i]) * inverse[i]);
    codes[i] = static_cast<uint8_t>(c > 0 ? (c < levels ? c : levels) : 0);
  }
}

inline void store_codes(const BlockLayout& layout, const uint8_t* codes, uint8_t* row) {
  if (layout.elem == Elem::int8) {
    std::memcpy(row, codes, static_cast<size_t>(layout.head_size));
    return;
  }
  const int half = layout.head_size / 2;
  for (int j = 0; j < half; ++j) row[j] = static_cast<uint8_t>(codes[j] | (codes[j + half] << 4));
}

constexpr int kMaxHead = 1024;

inline float levels_of(const BlockLayout& layout) {
  return layout.elem == Elem::int8 ? 255.0f : 15.0f;
}

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
  convert_loop<Elem::f16, Elem::f32>(block + layout.k_scale, scale, layout.head_size);
  convert_loop<Elem::f16, Elem::f32>(block + layout.k_min, low, layout.head_size);
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
  for (int d = 0; d < layout.head_size; ++d) high[d] = low[d] + levels_of(layout) * high[d];
}

void fit_keys(const BlockLayout& layout, const float* low, const float* high, uint8_t* block) {
  const KeyScales s = key_scales(layout, block);
  for (int d = 0; d < layout.head_size; ++d) fit({low[d], high[d]}, levels_of(layout), s.scale[d], s.low[d]);
}

bool widen_keys(const BlockLayout& layout, const float* low, const float* high, bool only_ask,
                uint8_t* block) {
  const float levels = levels_of(layout);
  const int size = layout.head_size;
  alignas(64) float scale[kMaxHead], base[kMaxHead];
  load_key_scales(layout, block, scale, base);
  const auto outside = [&](int d) {
    return (low[d] < base[d] - 0.5f * scale[d]) | (high[d] > base[d] + (levels + 0.5f) * scale[d]);
  };
  int count = 0;
  for (int d = 0; d < size; ++d) count += outside(d);
  if (only_ask || !count) return count > 0;
  const KeyScales s = key_scales(layout, block);
  for (int d = 0; d < size; ++d) {
    if (!outside(d)) continue;
    const float top = base[d] + levels * scale[d];
    fit({low[d] < base[d] ? low[d] : base[d], high[d] > top ? high[d] : top}, levels, s.scale[d], s.low[d]);
  }
  return true;
}

void encode_keys(const BlockLayout& layout, const float* k, int first, int n, uint8_t* block) {
  const int size = layout.head_size;
  alignas(64) float low[kMaxHead], inverse[kMaxHead];
  alignas(64) uint8_t codes[kMaxHead];
  load_key_scales(layout, block, inverse, low);
  for (int d = 0; d < size; ++d) inverse[d] = inverse[d] > 0 ? 1.0f / inverse[d] : 0.0f;
  for (int t = 0; t < n; ++t) {
    encode(k + static_cast<int64_t>(t) * size, inverse, low, levels_of(layout), size, codes);
    store_codes(layout, codes, block + layout.k + (first + t) * layout.row_bytes);
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
  const int size = layout.head_size, width = size / layout.v_groups;
  const float levels = levels_of(layout);
  uint16_t* v_scale = reinterpret_cast<uint16_t*>(block + layout.v_scale);
  uint16_t* v_min = reinterpret_cast<uint16_t*>(block + layout.v_min);
  alignas(64) float low[kMaxHead], inverse[kMaxHead];
  alignas(64) uint8_t codes[kMaxHead];
  for (int t = 0; t < n; ++t) {
    for (int g = 0; g < layout.v_groups; ++g) {
      const float* x = v + static_cast<int64_t>(t) * size + g * width;
      const int at = g * layout.block + first + t;
      fit(range_of(x, width), levels, v_scale[at], v_min[at]);
      const float scale = f16_to_f32(v_scale[at]), base = f16_to_f32(v_min[at]);
      for (int d = 0; d < width; ++d) {
        inverse[d] = scale > 0 ? 1.0f / scale : 0.0f;
        low[d] = base;
      }
      encode(x, inverse, low, levels, width, codes + g * width);
    }
    store_codes(layout, codes, block + layout.v + (first + t) * layout.row_bytes);
  }
}

void quantise(const BlockLayout& layout, const float* k, const float* v, int n, uint8_t* block) {
  alignas(64) float low[kMaxHead], high[kMaxHead];
  key_range(k, n, layout.head_size, low, high);
  fit_keys(layout, low, high, block);
  encode_keys(layout, k, 0, n, block);
  encode_values(layout, v, 0, n, block);
}

inline uint8_t code_at(const BlockLayout& layout, const uint8_t* row, int d) {
  if (layout.elem == Elem::int8) return row[d];
  const int half = layout.head_size / 2;
  return d < half ? row[d] & 15 : row[d - half] >> 4;
}

void read_row(const BlockLayout& layout, const uint8_t* block, int row, float* k, float* v) {
  const uint8_t* k_row = block + layout.k + row * layout.row_bytes;
  const uint8_t* v_row = block + layout.v + row * layout.row_bytes;
  if (!is_quantised(layout.elem)) {
    if (k) convert(layout.elem, k_row, Elem::f32, k, layout.head_size);
    if (v) convert(layout.elem, v_row, Elem::f32, v, layout.head_size);
    return;
  }
  const uint16_t* v_scale = reinterpret_cast<const uint16_t*>(block + layout.v_scale);
  const uint16_t* v_min = reinterpret_cast<const uint16_t*>(block + layout.v_min);
  const int width = layout.head_size / layout.v_groups;
  const bool bytes = layout.elem == Elem::int8;
  if (k) {
    alignas(64) float scale[kMaxHead], low[kMaxHead];
    load_key_scales(layout, block, scale, low);
    for (int d = 0; d < layout.head_size; ++d) {
      k[d] = low[d] + scale[d] * (bytes ? k_row[d] : code_at(layout, k_row, d));
    }
  }
  for (int d = 0; v && d < layout.head_size;) {
    const int at = d / width * layout.block + row;
    const float scale = f16_to_f32(v_scale[at]), low = f16_to_f32(v_min[at]);
    for (const int end = d + width; d < end; ++d) {
      v[d] = low + scale * (bytes ? v_row[d] : code_at(layout, v_row, d));
    }
  }
}

}  // namespace
}  // namespace coattn::COATTN_ISA
