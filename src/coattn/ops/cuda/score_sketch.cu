// Scores of one query token a sequence against sketches of keys, on tensor cores.
//
// A key is WORDS * 32 planes of one bit. A thread masks one bit out of every byte of its words: four planes, as they
// are, make a register of the A operand of m16n8k32 over bytes, in which bit i counts 2^i. What the planes are worth to
// the query heads of a KV head is the B operand, in 8 bits with a step that is 2^i smaller, so that the products of
// all bits of a kind are counted alike. Planes are ordered by what they are worth, so bit i is mostly worth twice bit
// i - 1, and 8 bits are enough. 16 keys x 32 planes are scored against up to 8 query heads by one instruction.
//
// Sums start at 1.5 * 2^23 as a float's bits: adding to those bits adds to the float.
//
// Constants: WARPS, WORDS (4 or 8), GROUP query heads a KV head (1 to 8), BLOCK tokens a block (a multiple of 16),
// CHUNK tokens a warp, D channels, F16 (0: bfloat16), CAP.

#include "half.cuh"

typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int PLANES = WORDS * 32;
constexpr int OWN = WORDS / 4;    // words of a thread
constexpr int TURNS = WORDS;      // products over 32 planes each: WORDS == 4: bits i and i + 4 in one
constexpr int KINDS = WORDS / 4;  // of steps
constexpr int PAD = (GROUP + 1) / 2 * 2;
constexpr u32 START = 0x4b400000;
constexpr float SHIFT = 12582912.f;
constexpr float LOG2E = 1.4426950408889634f;

// Which plane stands in byte b of the operand of thread t: of its first or second half, in turn i.
__device__ __forceinline__ int plane_of(int t, int half, int b, int i) {
  return WORDS == 4 ? 32 * t + 8 * b + i + 4 * half : 32 * (2 * t + half) + 8 * b + i;
}

// What every plane is worth to each query head, as operands: bq [rows, heads, TURNS, 2, 32]; the steps, scales
// [rows, heads, 8, KINDS]; what a key without planes scores, rest [rows, heads, 8]. One program a row and KV head.
extern "C" __global__ void __launch_bounds__(PLANES)
    weigh_planes(const Number* __restrict__ q, const Number* __restrict__ worth,
                 const float* __restrict__ base, const int* __restrict__ seq, u32* __restrict__ bq,
                 float* __restrict__ scales, float* __restrict__ rest, float scale, i64 q_seq, i64 q_head) {
  __shared__ float own[GROUP][D];
  __shared__ signed char codes[8][PLANES];
  __shared__ int top[GROUP][KINDS];
  const int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, p = threadIdx.x;
  const i64 line = (i64)row * heads + head, table = (i64)seq[row] * heads + head;
  for (int i = p; i < GROUP * D; i += PLANES)
    own[i / D][i % D] = wide(q[row * q_seq + (head * GROUP + i / D) * q_head + i % D]) * scale;
  for (int i = p; i < GROUP * KINDS; i += PLANES) top[i / KINDS][i % KINDS] = 0;
  __syncthreads();
  float found[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; ++g) found[g] = 0.f;
  const uint4* mine = (const uint4*)(worth + (table * PLANES + p) * D);
  for (int i = 0; i < D / 8; ++i) {
    const uint4 v = mine[i];
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = wide(words[j] & 0xffff), y = wide(words[j] >> 16);
#pragma unroll
      for (int g = 0; g < GROUP; ++g) found[g] += own[g][i * 8 + j * 2] * x + own[g][i * 8 + j * 2 + 1] * y;
    }
  }
  const int bit = p % 8, kind = WORDS == 4 ? 0 : bit / 4;
  const float small = 1.f / (1 << bit % 4);
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    float most = fabsf(found[g]) * small;
    // lanes p and p + 8 have the same bit
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 8));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 16));
    if (p % 32 < 8) atomicMax(&top[g][kind], __float_as_int(most));
  }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    float code = 0.f;
    if (g < GROUP) {
      const float most = __int_as_float(top[g][kind]);
      if (most > 0.f) code = rintf(found[g] * small * (127.f / most));
    }
    codes[g][p] = (signed char)code;
  }
  if (p < GROUP * KINDS) {
    const int g = p / KINDS, k = p % KINDS;
    scales[(line * 8 + g) * KINDS + k] = __int_as_float(top[g][k]) / 127.f / (k ? 16.f : 1.f);
  }
  for (int g = p / 32; g < GROUP; g += PLANES / 32) {
    float sum = 0.f;
    for (int i = p % 32; i < D; i += 32) sum += own[g][i] * base[table * D + i];
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    if (p % 32 == 0) rest[line * 8 + g] = sum;
  }
  __syncthreads();
  for (int i = p; i < TURNS * 64; i += PLANES) {
    const int lane = i % 32, half = i / 32 % 2, turn = i / 64;
    u32 word = 0;
    for (int b = 0; b < 4; ++b)
      word |= (u32)(unsigned char)codes[lane / 4][plane_of(lane % 4, half, b, turn)] << 8 * b;
    bq[line * TURNS * 64 + i] = word;
  }
}

__device__ __forceinline__ void multiply_bytes(u32* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, "
      "%2, %3};\n"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 two_halves(float first, float second) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
  return y;
}

struct Keys {
  u32 words[4][OWN];  // of four tokens: g, g + 8, g + 16, g + 24
  bool outside[4];    // there, and in no pool
  bool there[4];
};

// out [rows, heads, n, PAD] float16, less `rest` where scores are not capped; lse [rows, chunks, heads * GROUP].
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    score_sketch(const u32* __restrict__ bq, const float* __restrict__ scales, const float* __restrict__ rest,
                 const u32* __restrict__ kept, const int* __restrict__ table, const int* __restrict__ tokens,
                 const int* __restrict__ seq, const short* __restrict__ place_of, u32* __restrict__ out,
                 float* __restrict__ lse, float softcap, int n, int chunks, int most, i64 block_stride,
                 i64 head_stride, i64 table_seq) {
  const int row = blockIdx.z, head = blockIdx.y, heads = gridDim.y;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int chunk = blockIdx.x * WARPS + threadIdx.x / 32;
  if (chunk >= chunks) return;
  const int start = chunk * CHUNK, count = min(tokens[row], n), end = min(start + CHUNK, count);
  const i64 line = (i64)row * heads + head;
  float* const said = lse + ((i64)row * chunks + chunk) * heads * GROUP + head * GROUP;
  if (start >= count) {
    if (lane < GROUP) said[lane] = -INFINITY;
    return;
  }
  const short* const places = place_of + ((i64)seq[row] * heads + head) * most;
  // blocks of the chunk, in the lanes' registers
  int known[(CHUNK / BLOCK + 31) / 32];
#pragma unroll
  for (int i = 0; i < (CHUNK / BLOCK + 31) / 32; ++i) {
    const int b = i * 32 + lane;
    known[i] = b < CHUNK / BLOCK && start + b * BLOCK < end ? table[row * table_seq + start / BLOCK + b] : 0;
  }
  auto read = [&](int at) {
    Keys x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = at + i * 8 + g;
      x.there[i] = token < end;
      x.outside[i] = x.there[i] && places[token] < 0;
#pragma unroll
      for (int j = 0; j < OWN; ++j) x.words[i][j] = 0;
      const int b = (token - start) / BLOCK;
      const int id = __shfl_sync(0xffffffff, known[b / 32 % ((CHUNK / BLOCK + 31) / 32)], b % 32);
      if (x.there[i]) {
        const u32* from = kept + id * block_stride + head * head_stride + token % BLOCK * WORDS + t * OWN;
        if (OWN == 2) {
          const uint2 v = __ldg((const uint2*)from);
          x.words[i][0] = v.x, x.words[i][OWN - 1] = v.y;
        } else {
          x.words[i][0] = __ldg(from);
        }
      }
    }
    return x;
  };
  Keys next = read(start), later = read(start + 32);
  u32 b[TURNS][2];
#pragma unroll
  for (int i = 0; i < TURNS * 2; ++i) b[i / 2][i % 2] = bq[line * TURNS * 64 + i * 32 + lane];
  float step[2][KINDS], none[2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int own = 2 * t + c;
    none[c] = own < GROUP ? rest[line * 8 + own] : 0.f;
#pragma unroll
    for (int k = 0; k < KINDS; ++k) step[c][k] = own < GROUP ? scales[(line * 8 + own) * KINDS + k] : 0.f;
  }
  // what a score has in common with all others can be a thousand times what tells them apart: 16 bits hold the rest
  const float away[2] = {CAP ? 0.f : none[0], CAP ? 0.f : none[1]};
  for (int at = start; at < end; at += 32) {
    const Keys now = next;
    next = later;
    later = read(at + 64);
    float score[4][2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      u32 c[KINDS][4];
#pragma unroll
      for (int i = 0; i < KINDS * 4; ++i) c[i / 4][i % 4] = START;
      const u32 *x = now.words[2 * pair], *y = now.words[2 * pair + 1];
      if (OWN == 2) {
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
          const u32 mask = 0x01010101u << i;
          multiply_bytes(c[i / 4 % KINDS], x[0] & mask, y[0] & mask, x[OWN - 1] & mask, y[OWN - 1] & mask,
                         b[i][0], b[i][1]);
        }
      } else {
        const u32 high_x = x[0] >> 4, high_y = y[0] >> 4;
#pragma unroll
        for (int i = 0; i < TURNS; ++i) {
          const u32 mask = 0x01010101u << i;
          multiply_bytes(c[0], x[0] & mask, y[0] & mask, high_x & mask, high_y & mask, b[i][0], b[i][1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float found = none[i % 2];
#pragma unroll
        for (int k = 0; k < KINDS; ++k) found += (__uint_as_float(c[k][i]) - SHIFT) * step[i % 2][k];
#if CAP
        found = softcap * tanhf(found / softcap);
#endif
        score[2 * pair + i / 2][i % 2] = found;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (2 * t < PAD && now.there[i])
        out[((line * n + at + i * 8 + g) * PAD) / 2 + t] =
            two_halves(score[i][0] - away[0], score[i][1] - away[1]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float high = top[c];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[i][c] = now.outside[i] ? score[i][c] * LOG2E : -INFINITY;
        high = fmaxf(high, score[i][c]);
      }
      const float shift = high == -INFINITY ? 0.f : high;
      sum[c] *= power(top[c] - shift);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[c] += power(score[i][c] - shift);
      top[c] = high;
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) {
      const float other = __shfl_xor_sync(0xffffffff, top[c], i),
                  more = __shfl_xor_sync(0xffffffff, sum[c], i);
      const float high = fmaxf(top[c], other), shift = high == -INFINITY ? 0.f : high;
      sum[c] = sum[c] * power(top[c] - shift) + more * power(other - shift);
      top[c] = high;
    }
    if (g == 0 && 2 * t + c < GROUP) said[2 * t + c] = (top[c] + __log2f(sum[c])) / LOG2E;
  }
}
