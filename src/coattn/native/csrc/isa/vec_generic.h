// Four floats with the compiler's vector extension: SSE2 on x86-64, NEON on aarch64, scalars elsewhere.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "isa/elements.h"

namespace coattn::generic {
namespace {

constexpr int W = 4;  // lanes
constexpr int kRegisters = 16;
constexpr int kAccs = 8;   // dot products in flight, a multiple of W
constexpr int kMaxMG = 4;  // queries that share one loaded value vector

typedef float vf __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

inline vf vset(float x) {
  return vf{x, x, x, x};
}
inline vf vzero() {
  return vset(0);
}
inline vf vload(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void vstore(float* p, vf v) {
  std::memcpy(p, &v, sizeof(v));
}
inline vf vadd(vf a, vf b) {
  return a + b;
}
inline vf vsub(vf a, vf b) {
  return a - b;
}
inline vf vmul(vf a, vf b) {
  return a * b;
}
// Fused only where this says so: the compiler is told not to (-ffp-contract=off, see CMakeLists.txt).
inline vf vfma(vf a, vf b, vf c) {
#if defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline vf pick(vi mask, vf a, vf b) {
  return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}
// b where either is NaN, as x86 does it: vmax(limit, x) keeps a NaN in x.
inline vf vmax(vf a, vf b) {
  return pick(a > b, a, b);
}
inline vf vmin(vf a, vf b) {
  return pick(a < b, a, b);
}
inline vf vabs(vf a) {
  return (vf)((vi)a & 0x7fffffff);
}
inline vf vless_pick(vf x, vf y, vf a, vf b) {
  return pick(x < y, a, b);
}
inline vf vcopysign(vf magnitude, vf sign) {
  return (vf)(((vi)magnitude & 0x7fffffff) | ((vi)sign & (int32_t)0x80000000));
}
inline vf vdiv(vf a, vf b) {
  return a / b;
}
inline vf vround(vf x) {
  // |x| < 2^22 here: adding and taking away 1.5 * 2^23 rounds to nearest.
  const vf magic = vset(12582912.0f);
  return (x + magic) - magic;
}
inline vi to_int(vf x) {
  return vi{(int)x[0], (int)x[1], (int)x[2], (int)x[3]};
}
// x * 2^n for integral n in -126..127.
inline vf vscale2(vf x, vf n) {
  const vf magic = vset(12582912.0f);
  const vi bits = (vi)(n + magic) - (vi)magic;
  return x * (vf)((bits + 127) << 23);
}
constexpr float kExpLowest = -87.0f;

inline vf vkeep(vf x, int n, float other) {
  const vi lane{0, 1, 2, 3};
  return pick(lane < vi{n, n, n, n}, x, vset(other));
}
inline float vhsum(vf a) {
  return (a[0] + a[1]) + (a[2] + a[3]);
}
inline float vhmax(vf a) {
  float best = a[0];
  for (int i = 1; i < W; ++i) best = best > a[i] ? best : a[i];
  return best;
}
// lane i = sum of row i
inline vf vreduce(const vf* r) {
  vf out;
  for (int i = 0; i < W; ++i) out[i] = vhsum(r[i]);
  return out;
}
inline vf from_f16(vu x) {
  const vu sign = (x & 0x8000u) << 16, rest = (x & 0x7fffu) << 13;
  const vf magnitude = (vf)rest * vset(0x1p112f);
  const vu special = (vu)(rest >= 0x0f800000u);
  return (vf)(sign | (((vu)magnitude & ~special) | ((rest | 0x7f800000u) & special)));
}
inline vf vload_f16(const uint16_t* p) {
  return from_f16(vu{p[0], p[1], p[2], p[3]});
}
inline vf vload_bf16(const uint16_t* p) {
  return (vf)(vu{p[0], p[1], p[2], p[3]} << 16);
}
inline vf vload_u8(const uint8_t* p) {
  return vf{(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
}
// Codes 0..255 out of rounded floats.
inline void vstore_u8(uint8_t* p, vf v) {
  for (int i = 0; i < W; ++i) p[i] = (uint8_t)(int)v[i];
}
inline void load_pair_bf16(const uint8_t* p, vf& a, vf& b) {
  vu x;
  std::memcpy(&x, p, sizeof(x));
  a = (vf)(x << 16);
  b = (vf)(x & 0xffff0000u);
}
inline void load_pair_u8(const uint8_t* p, vf& a, vf& b) {
  a = vload_u8(p);
  b = vload_u8(p + W);
}
inline void load_pair_u4(const uint8_t* p, vf& a, vf& b) {
  a = vf{(float)(p[0] & 15), (float)(p[1] & 15), (float)(p[2] & 15), (float)(p[3] & 15)};
  b = vf{(float)(p[0] >> 4), (float)(p[1] >> 4), (float)(p[2] >> 4), (float)(p[3] >> 4)};
}

// Copies n of `room` bytes and zeroes the rest, for the last channels of a row that do not fill a vector.
inline void copy_tail(uint8_t* to, const uint8_t* from, int n, int room) {
  std::memset(to, 0, static_cast<size_t>(room));
  std::memcpy(to, from, static_cast<size_t>(n));
}

}  // namespace
}  // namespace coattn::generic
