// Eight floats: AVX2 + FMA + F16C.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "isa/elements.h"

namespace coattn::avx2 {
namespace {

constexpr int W = 8;
constexpr int kRegisters = 16;
constexpr int kAccs = 8;
constexpr int kMaxMG = 4;  // 8 sums + 2 values + 1 weight fit the 16 registers

typedef __m256 vf;

inline vf vset(float x) {
  return _mm256_set1_ps(x);
}
inline vf vzero() {
  return _mm256_setzero_ps();
}
inline vf vload(const float* p) {
  return _mm256_loadu_ps(p);
}
inline void vstore(float* p, vf v) {
  _mm256_storeu_ps(p, v);
}
inline vf vadd(vf a, vf b) {
  return _mm256_add_ps(a, b);
}
inline vf vsub(vf a, vf b) {
  return _mm256_sub_ps(a, b);
}
inline vf vmul(vf a, vf b) {
  return _mm256_mul_ps(a, b);
}
inline vf vdiv(vf a, vf b) {
  return _mm256_div_ps(a, b);
}
inline vf vfma(vf a, vf b, vf c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline vf vmax(vf a, vf b) {
  return _mm256_max_ps(a, b);
}
inline vf vmin(vf a, vf b) {
  return _mm256_min_ps(a, b);
}
inline vf vabs(vf a) {
  return _mm256_andnot_ps(vset(-0.0f), a);
}
inline vf vless_pick(vf x, vf y, vf a, vf b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}
inline vf vcopysign(vf magnitude, vf sign) {
  return _mm256_or_ps(vabs(magnitude), _mm256_and_ps(vset(-0.0f), sign));
}
inline vf vround(vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for integral n in -126..127.
inline vf vscale2(vf x, vf n) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(bits));
}
constexpr float kExpLowest = -87.0f;

inline vf vkeep(vf x, int n, float other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(vset(other), x,
                          _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)));
}
inline float vhsum(vf a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float vhmax(vf a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// lane i = sum of row i
inline vf vreduce(const vf* r) {
  const vf a = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
  const vf b = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline vf vload_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline vf vload_bf16(const uint16_t* p) {
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
}
inline vf vload_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void vstore_u8(uint8_t* p, vf v) {
  const __m256i x = _mm256_cvtps_epi32(v);
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
inline void load_pair_bf16(const uint8_t* p, vf& a, vf& b) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  a = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  b = _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void load_pair_u8(const uint8_t* p, vf& a, vf& b) {
  a = vload_u8(p);
  b = vload_u8(p + W);
}
inline void load_pair_u4(const uint8_t* p, vf& a, vf& b) {
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  a = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
  b = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 4));
}

// Copies n of `room` bytes and zeroes the rest, for the last channels of a row that do not fill a vector.
inline void copy_tail(uint8_t* to, const uint8_t* from, int n, int room) {
  std::memset(to, 0, static_cast<size_t>(room));
  std::memcpy(to, from, static_cast<size_t>(n));
}

}  // namespace
}  // namespace coattn::avx2
