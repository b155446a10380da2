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
  const KeyScales s = key_scales(layout, const_cast<uint8_t*>(block));
  for (int d = 0; d < layout.head_size; ++d) {
    low[d] = f16_to_f32(s.low[d]);
    high[d] = low[d] + levels_of(layout) * f16_to_f32(s.scale[d]);
  }
}

void fit_keys(const BlockLayout& layout, const float* low, const float* high, uint8_t* block) {
  const KeyScales s = key_scales(layout, block);
  for (int d = 0; d < layout.head_size; ++d) fit({low[d], high[d]}, levels_of(layout), s.scale[d], s.low[d]);
}

bool widen_keys(const BlockLayout& layout, const float* low, const float* high, bool only_ask,
                uint8_t* block) {
  const KeyScales s = key_scales(layout, block);
  const float levels = levels_of(layout);
  bool changed = false;
  for (int d = 0; d < layout.head_size; ++d) {
    const float scale = f16_to_f32(s.scale[d]), base = f16_to_f32(s.low[d]);
    if (!(low[d] < base - 0.5f * scale) && !(high[d] > base + (levels + 0.5f) * scale)) continue;
    changed = true;
    if (only_ask) break;
    const float top = base + levels * scale;
    fit({low[d] < base ? low[d] : base, high[d] > top ? high[d] : top}, levels, s.scale[d], s.low[d]);
  }
  return changed;
}

void encode_keys(const BlockLayout& layout, const float* k, int first, int n, uint8_t* block) {
  const int size = layout.head_size;
  const KeyScales s = key_scales(layout, block);
  alignas(64) float low[kMaxHead], inverse[kMaxHead];
  alignas(64) uint8_t codes[kMaxHead];
  for (int d = 0; d < size; ++d) {
    const float scale = f16_to_f32(s.scale[d]);
    inverse[d] = scale > 0 ? 1.0f / scale : 0.0f;
    low[d] = f16_to_f32(s.low[d]);
  }
  for (int t = 0; t < n; ++t) {
    encode(k + static_cast<int64_t>(t) * size, inverse, low, levels_of(layout), size, codes);
    store_codes(layout, codes, block + layout.k + (first + t) * layout.row_bytes);
  }
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
      Range r{__builtin_inff(), -__builtin_inff()};
      for (int d = 0; d < width; ++d) {
        r.low = x[d] < r.low ? x[d] : r.low;
        r.high = x[d] > r.high ? x[d] : r.high;
      }
      const int at = g * layout.block + first + t;
      fit(r, levels, v_scale[at], v_min[at]);
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
  const uint16_t* k_scale = reinterpret_cast<const uint16_t*>(block + layout.k_scale);
  const uint16_t* k_min = reinterpret_cast<const uint16_t*>(block + layout.k_min);
  const uint16_t* v_scale = reinterpret_cast<const uint16_t*>(block + layout.v_scale);
  const uint16_t* v_min = reinterpret_cast<const uint16_t*>(block + layout.v_min);
  const int width = layout.head_size / layout.v_groups;
  for (int d = 0; k && d < layout.head_size; ++d) {
    k[d] = f16_to_f32(k_min[d]) + f16_to_f32(k_scale[d]) * code_at(layout, k_row, d);
  }
  for (int d = 0; v && d < layout.head_size; ++d) {
    const int at = d / width * layout.block + row;
    v[d] = f16_to_f32(v_min[at]) + f16_to_f32(v_scale[at]) * code_at(layout, v_row, d);
  }
}

}  // namespace
}  // namespace coattn::COATTN_ISA
