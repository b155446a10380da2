// Sixteen floats: AVX-512 F, BW, VL, DQ.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "isa/elements.h"

namespace coattn::avx512 {
namespace {

constexpr int W = 16;
constexpr int kRegisters = 32;
constexpr int kAccs = 16;
constexpr int kMaxMG = 8;

typedef __m512 vf;

inline vf vset(float x) {
  return _mm512_set1_ps(x);
}
inline vf vzero() {
  return _mm512_setzero_ps();
}
inline vf vload(const float* p) {
  return _mm512_loadu_ps(p);
}
inline void vstore(float* p, vf v) {
  _mm512_storeu_ps(p, v);
}
inline vf vadd(vf a, vf b) {
  return _mm512_add_ps(a, b);
}
inline vf vsub(vf a, vf b) {
  return _mm512_sub_ps(a, b);
}
inline vf vmul(vf a, vf b) {
  return _mm512_mul_ps(a, b);
}
inline vf vdiv(vf a, vf b) {
  return _mm512_div_ps(a, b);
}
inline vf vfma(vf a, vf b, vf c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline vf vmax(vf a, vf b) {
  return _mm512_max_ps(a, b);
}
inline vf vmin(vf a, vf b) {
  return _mm512_min_ps(a, b);
}
inline vf vabs(vf a) {
  return _mm512_abs_ps(a);
}
inline vf vless_pick(vf x, vf y, vf a, vf b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}
inline vf vcopysign(vf magnitude, vf sign) {
  return _mm512_or_ps(vabs(magnitude), _mm512_and_ps(vset(-0.0f), sign));
}
inline vf vround(vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline vf vscale2(vf x, vf n) {
  return _mm512_scalef_ps(x, n);
}
constexpr float kExpLowest = -104.0f;  // scalef goes through the subnormals down to zero

// The first n lanes; all of them for n >= 16.
inline __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1u);
}
inline vf vkeep(vf x, int n, float other) {
  return _mm512_mask_mov_ps(vset(other), first_lanes(n), x);
}
inline float vhsum(vf a) {
  return _mm512_reduce_add_ps(a);
}
inline float vhmax(vf a) {
  return _mm512_reduce_max_ps(a);
}
// lane i = sum of row i: four rounds that halve the number of rows and the spread of each sum.
inline vf vreduce(const vf* r) {
  vf h[8];
  for (int i = 0; i < 8; ++i) {  // rows i and i + 8: 256-bit halves
    h[i] = vadd(_mm512_shuffle_f32x4(r[i], r[i + 8], 0x44), _mm512_shuffle_f32x4(r[i], r[i + 8], 0xee));
  }
  vf q[4];
  for (int i = 0; i < 4; ++i) {  // then 128-bit quarters: q[i] holds rows i, i + 4, i + 8, i + 12
    q[i] = vadd(_mm512_shuffle_f32x4(h[i], h[i + 4], 0x88), _mm512_shuffle_f32x4(h[i], h[i + 4], 0xdd));
  }
  const vf a = vadd(_mm512_unpacklo_ps(q[0], q[1]), _mm512_unpackhi_ps(q[0], q[1]));
  const vf b = vadd(_mm512_unpacklo_ps(q[2], q[3]), _mm512_unpackhi_ps(q[2], q[3]));
  // a: per quarter (q0, q1, q0, q1), b: (q2, q3, q2, q3)
  const vf s = vadd(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  // Quarters now hold rows 0-3, 8-11, 4-7, 12-15.
  return _mm512_shuffle_f32x4(s, s, 0xd8);
}
inline vf vload_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vf vload_bf16(const uint16_t* p) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
}
inline vf vload_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Not vcvtneps2bf16: it treats subnormals as zero.
inline __m256i to_bf16(vf v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_srli_epi32(bits, 16),
                                 _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(rounded);
}
inline void vstore_u8(uint8_t* p, vf v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline void load_pair_bf16(const uint8_t* p, vf& a, vf& b) {
  const __m512i x = _mm512_loadu_si512(p);
  a = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  b = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void load_pair_u8(const uint8_t* p, vf& a, vf& b) {
  a = vload_u8(p);
  b = vload_u8(p + W);
}
// A permute of the table 0..15 looks at the low four bits of each index only: mask and conversion in one.
inline void load_pair_u4(const uint8_t* p, vf& a, vf& b) {
  const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  a = _mm512_permutexvar_ps(x, table);
  b = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), table);
}

// Copies n of `room` bytes and zeroes the rest, for the last channels of a row that do not fill a vector.
// Whole-vector stores, so that the loads that follow are forwarded from them.
inline void copy_tail(uint8_t* to, const uint8_t* from, int n, int room) {
  for (int i = 0; i < room; i += 64) {
    const int left = n - i < 0 ? 0 : n - i;
    const __mmask64 mask = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    _mm512_storeu_si512(to + i, _mm512_maskz_loadu_epi8(mask, from + i));
  }
}

}  // namespace
}  // namespace coattn::avx512
