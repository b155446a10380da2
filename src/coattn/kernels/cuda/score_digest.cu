// What the digests of blocks promise a query, on tensor cores: each digest is read once for all query heads
// of its KV head.
//
// A warp has CHUNK digests of one KV head. A thread reads its operands as they lie, 16 bytes at a time, the
// next eight digests while it multiplies these: which channels stand in a column of the operand is ours to
// choose, as long as the query's are ordered alike. Half of q against the lowest of each channel and half
// against the highest, apart by `slack`; these numbers become two of 16 bits each, of which one stands in
// rows 0 to 7 of the operand and the rest in rows 8 to 15, so the sum of both, nearly as exact as float32,
// costs no more than one.
//
// Constants: WARPS, D channels (a multiple of 32), GROUP query heads a KV head (1 to 8), CHUNK, F16 (0:
// bfloat16), CAP.

#include "half.cuh"

typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

#define UNITS (D / 32)
#define TILES (CHUNK / 8)

__device__ __forceinline__ uint4 stream(const void* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

struct Tile {
  uint4 side[2][UNITS];  // lowest, highest
};

// Two channels of the query, as the operand's rows: what 16 bits hold of them, and the rest.
struct Two {
  u32 first, rest;
};
__device__ __forceinline__ Two split(float low, float high) {
  Two y;
  y.first = pair(low, high);
  y.rest = pair(low - wide(y.first & 0xffff), high - wide(y.first >> 16));
  return y;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    score_digest(const unsigned short* __restrict__ q, const unsigned char* __restrict__ digests,
                 const int* __restrict__ table, const int* __restrict__ tokens, float* __restrict__ out,
                 float* __restrict__ sums, float slack, float scale, float softcap, int m, int block,
                 int chunks, int q_seq, int q_head, i64 digest_stride, i64 head_stride, int side_stride,
                 i64 table_seq) {
  const int seq = blockIdx.z, head = blockIdx.y, heads = gridDim.y;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chunk = blockIdx.x * WARPS + threadIdx.x / 32;
  if (chunk >= chunks) return;
  const int start = chunk * CHUNK, full = min(tokens[seq] / block, m) - start;
  const i64 line = ((i64)seq * heads + head) * GROUP + g;
  if (full <= 0) {
    if (t == 0 && g < GROUP) sums[line * chunks + chunk] = -INFINITY;
    return;
  }
  int ids[CHUNK / 32];
#pragma unroll
  for (int i = 0; i < CHUNK / 32; ++i)
    ids[i] = i * 32 + lane < full ? table[seq * table_seq + start + i * 32 + lane] : 0;

  const unsigned char* const mine = digests + head * head_stride + t * 16;
  auto read = [&](int tile) {
    Tile x;
    const int id = __shfl_sync(0xffffffff, ids[tile / 4], tile % 4 * 8 + g);
    const unsigned char* at = mine + id * digest_stride;
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int u = 0; u < UNITS; ++u) x.side[s][u] = stream(at + s * side_stride + u * 64);
    return x;
  };
  Tile next = read(0);

  Two a[2][UNITS][4];
#pragma unroll
  for (int u = 0; u < UNITS; ++u) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (g < GROUP)
      v = *(const uint4*)(q + (i64)seq * q_seq + (i64)(head * GROUP + g) * q_head + u * 32 + t * 8);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = wide(words[i] & 0xffff), y = wide(words[i] >> 16);
      const float swing_x = slack * fabsf(x), swing_y = slack * fabsf(y);
      a[0][u][i] = split((x - swing_x) * 0.5f, (y - swing_y) * 0.5f);
      a[1][u][i] = split((x + swing_x) * 0.5f, (y + swing_y) * 0.5f);
    }
  }

  float score[TILES][2];
  float top = -INFINITY;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const Tile now = next;
    if (tile + 1 < TILES) next = read(tile + 1);
    float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int u = 0; u < UNITS; ++u) {
        const uint4 b = now.side[s][u];
        const Two* x = a[s][u];
        multiply(c, x[0].first, x[0].rest, x[1].first, x[1].rest, b.x, b.y);
        multiply(c, x[2].first, x[2].rest, x[3].first, x[3].rest, b.z, b.w);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float y = (c[i] + c[i + 2]) * scale;
#if CAP
      y = softcap * tanhf(y / softcap);
#endif
      score[tile][i] = tile * 8 + t * 2 + i < full ? y : -INFINITY;
      top = fmaxf(top, score[tile][i]);
    }
  }
  top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
  float sum = 0.f;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile * 8 + t * 2 + i;
      sum += __expf(score[tile][i] - top);
      if (g < GROUP && row < full) out[line * m + start + row] = score[tile][i];
    }
  sum += __shfl_xor_sync(0xffffffff, sum, 1);
  sum += __shfl_xor_sync(0xffffffff, sum, 2);
  if (t == 0 && g < GROUP) sums[line * chunks + chunk] = top + __logf(sum);
}
