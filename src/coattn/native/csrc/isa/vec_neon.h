// Four floats: NEON as every 64-bit ARM CPU has it. Results are those of isa/vec_generic.h, bit for bit.
#pragma once

#include <arm_neon.h>

#include <cstring>

#include "isa/elements.h"

namespace coattn::neon {
namespace {

constexpr int W = 4;
constexpr int kRegisters = 32;
constexpr int kAccs = 8;   // an FMA takes 4 cycles, and a Neoverse N1 starts 2 in each
constexpr int kMaxMG = 4;  // 16 sums + 4 values + 4 weights fit the 32 registers

typedef float32x4_t vf;

inline vf vset(float x) {
  return vdupq_n_f32(x);
}
inline vf vzero() {
  return vdupq_n_f32(0);
}
inline vf vload(const float* p) {
  return vld1q_f32(p);
}
inline void vstore(float* p, vf v) {
  vst1q_f32(p, v);
}
inline vf vadd(vf a, vf b) {
  return vaddq_f32(a, b);
}
inline vf vsub(vf a, vf b) {
  return vsubq_f32(a, b);
}
inline vf vmul(vf a, vf b) {
  return vmulq_f32(a, b);
}
inline vf vdiv(vf a, vf b) {
  return vdivq_f32(a, b);
}
inline vf vfma(vf a, vf b, vf c) {
  return vfmaq_f32(c, a, b);
}
// b where either is NaN, as x86 does it: vmax(limit, x) keeps a NaN in x. fmax and fmaxnm do something else.
inline vf vmax(vf a, vf b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
inline vf vmin(vf a, vf b) {
  return vbslq_f32(vcltq_f32(a, b), a, b);
}
inline vf vabs(vf a) {
  return vabsq_f32(a);
}
inline vf vless_pick(vf x, vf y, vf a, vf b) {
  return vbslq_f32(vcltq_f32(x, y), a, b);
}
inline vf vcopysign(vf magnitude, vf sign) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude);
}
inline vf vround(vf x) {
  return vrndnq_f32(x);
}
// x * 2^n for integral n in -126..127.
inline vf vscale2(vf x, vf n) {
  const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
  return vmulq_f32(x, vreinterpretq_f32_s32(bits));
}
constexpr float kExpLowest = -87.0f;

inline vf vkeep(vf x, int n, float other) {
  const int32x4_t lane{0, 1, 2, 3};
  return vbslq_f32(vcltq_s32(lane, vdupq_n_s32(n)), x, vset(other));
}
inline float vhsum(vf a) {
  return vaddvq_f32(a);  // neighbours first
}
inline float vhmax(vf a) {
  return vmaxvq_f32(a);
}
// lane i = sum of row i
inline vf vreduce(const vf* r) {
  return vpaddq_f32(vpaddq_f32(r[0], r[1]), vpaddq_f32(r[2], r[3]));
}
inline vf vload_f16(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
inline vf vload_bf16(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
inline vf vload_u8(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof(four));
  const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}
// Codes 0..255 out of rounded floats.
inline void vstore_u8(uint8_t* p, vf v) {
  const uint16x4_t words = vmovn_u32(vcvtq_u32_f32(v));
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
  std::memcpy(p, &four, sizeof(four));
}
// A Neoverse N1 has two vector pipes. Transposes, ands and additions run on both, shifts on one, conversions on one
// and half as often: hence no shift for bf16, and no conversion for bytes.
inline void load_pair_bf16(const uint8_t* p, vf& a, vf& b) {
  const uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(p)), zero = vdupq_n_u16(0);
  a = vreinterpretq_f32_u16(vtrn1q_u16(zero, x));
  b = vreinterpretq_f32_u16(vtrn2q_u16(zero, x));
}
inline void load_pair_u8(const uint8_t* p, vf& a, vf& b) {
  const uint16x8_t x = vmovl_u8(vld1_u8(p)), high = vdupq_n_u16(0x4b00);  // of 2^23
  a = vsubq_f32(vreinterpretq_f32_u16(vzip1q_u16(x, high)), vset(0x1p23f));
  b = vsubq_f32(vreinterpretq_f32_u16(vzip2q_u16(x, high)), vset(0x1p23f));
}
inline void load_pair_u4(const uint8_t* p, vf& a, vf& b) {
  uint32_t four;
  std::memcpy(&four, p, sizeof(four));
  const uint32x4_t x = vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
  a = vcvtq_f32_u32(vandq_u32(x, vdupq_n_u32(15)));
  b = vcvtq_f32_u32(vshrq_n_u32(x, 4));
}

// Copies n of `room` bytes and zeroes the rest, for the last channels of a row that do not fill a vector.
inline void copy_tail(uint8_t* to, const uint8_t* from, int n, int room) {
  std::memset(to, 0, static_cast<size_t>(room));
  std::memcpy(to, from, static_cast<size_t>(n));
}

}  // namespace
}  // namespace coattn::neon
