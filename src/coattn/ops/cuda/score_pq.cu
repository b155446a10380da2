// Scores of one query token a sequence against product-quantised keys, on tensor cores.
//
// The codebook lies in shared memory. A thread reads the codes of a row (a key) as they lie, 16 bytes at a time,
// and what it finds under a code is, as it is, one register of the A operand of m16n8k16: lane 4r + t owns two
// columns of row r, and which channels stand in a column is ours to choose, as long as the query's operand is
// ordered alike. So 16 keys x 16 channels are scored against up to 8 query heads by one instruction, in float32.
//
// Bound: random 8-byte reads of shared memory serve about 16 lanes in 3.1 cycles (bank conflicts), 4-byte reads
// 32 lanes in 3.5.
//
// Constants: BITS of a code, GROUPS of channels, WIDTH channels each (2 or 4), GROUP query heads a KV head (1 to 8),
// BLOCK tokens a block (a multiple of 16), COUNT centroids, F16 (0: bfloat16), CAP (soft-capped scores), BYTES
// (centroids of 4 channels in 8 bits each, as code - 128, to be multiplied by `steps`: half the shared memory traffic).

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int CODES = GROUPS % 32 == 0 ? 8 : 4;  // of one thread in one strip of a row
constexpr int STRIPS = GROUPS / (4 * CODES);
constexpr int ROW = GROUPS * BITS / 8;
constexpr int SHIFT = BITS == 16 ? 0 : CODES == 8 ? (8 * BITS * 3) % 32 > (8 * BITS) % 32 ? (8 * BITS * 3) % 32 : (8 * BITS) % 32 : 28;
constexpr int WORDS = BITS == 16 ? CODES / 2 : (SHIFT + CODES * BITS + 31) / 32;
constexpr int THREADS = 512, WARPS = THREADS / 32, UNIT = 16;
constexpr u32 MASK = BITS == 16 ? 0xffffu : (1u << BITS) - 1;

struct Codes {
  u32 word[STRIPS][WORDS];
};

__device__ __forceinline__ void read(Codes& to, const unsigned char* row, int t) {
#pragma unroll
  for (int s = 0; s < STRIPS; ++s) {
    if constexpr (BITS == 16 && CODES == 8) {
      const uint4 x = __ldcs(reinterpret_cast<const uint4*>(row + s * 64 + t * 16));
      to.word[s][0] = x.x, to.word[s][1] = x.y, to.word[s][2] = x.z, to.word[s][3] = x.w;
    } else if constexpr (BITS == 16) {
      const uint2 x = __ldcs(reinterpret_cast<const uint2*>(row + s * 32 + t * 8));
      to.word[s][0] = x.x, to.word[s][1] = x.y;
    } else {
      const int first = (s * 4 + t) * CODES * BITS;
      const u32* from = reinterpret_cast<const u32*>(row) + first / 32;
      const int shift = first % 32;
      u32 raw[WORDS + 1];
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        // the last word may lie past the row, and is not needed then
        const bool there = (i + 1) * 32 - shift <= 31 + CODES * BITS;
        raw[i] = there ? __ldcs(from + i) : 0;
      }
      raw[WORDS] = 0;
#pragma unroll
      for (int i = 0; i < WORDS; ++i) to.word[s][i] = __funnelshift_r(raw[i], raw[i + 1], shift);
    }
  }
}

__device__ __forceinline__ u32 code(const u32 (&word)[WORDS], int i) {
  const int bit = i * BITS, at = bit / 32, r = bit % 32;
  const u32 x = r + BITS <= 32 ? word[at] >> r : __funnelshift_r(word[at], word[at + 1 < WORDS ? at + 1 : at], r);
  return x & MASK;
}

// Two bytes of x, each less 128, as two float16.
template <u32 WHICH>
__device__ __forceinline__ u32 halves(u32 x) {
  u32 y;
  const u32 magic = 0x64646464u, bias = 0x64806480u;  // 1024 + byte, less 1152
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(magic), "n"(WHICH));
  asm("sub.f16x2 %0, %1, %2;" : "=r"(y) : "r"(y), "r"(bias));
  return y;
}

// Two numbers of the query's type as two float16, multiplied.
__device__ __forceinline__ u32 scaled(u32 x, float s0, float s1) {
  float a, b;
#if F16
  asm("{.reg .b16 l,h; mov.b32 {l,h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(a), "=f"(b) : "r"(x));
#else
  a = __uint_as_float(x << 16), b = __uint_as_float(x & 0xffff0000u);
#endif
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b * s1), "f"(a * s0));
  return y;
}

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if F16 || BYTES
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Floats as integers of the same order.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    score_pq(const u16* q, const unsigned char* codes, const uint4* book, const int* table, const int* tokens,
             const float* steps, float* out, u32* top, float scale, float softcap, i64 q_seq, i64 q_head, i64 block_stride,
             i64 head_stride, i64 table_seq, i64 n, int kv_heads) {
  extern __shared__ uint4 shared[];
  const int seq = blockIdx.z, head = blockIdx.y, count = tokens[seq];
  const int units = (count + UNIT - 1) / UNIT, each = (units + gridDim.x - 1) / gridDim.x;
  const int first = blockIdx.x * each, last = min(first + each, units);
  if (first >= last) return;
  for (int i = threadIdx.x; i < COUNT * WIDTH * (BYTES ? 1 : 2) / 16; i += THREADS) shared[i] = book[i];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4, r = lane / 4;
  // the query's operand: column r is query head r of the group, rows as the thread's own channels
  constexpr int PAIRS = CODES * WIDTH / 2;
  u32 b[STRIPS][PAIRS];
#pragma unroll
  for (int s = 0; s < STRIPS; ++s) {
    const u32* from = reinterpret_cast<const u32*>(q + seq * q_seq + (head * GROUP + r) * q_head) +
                      (s * 4 + t) * PAIRS;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      b[s][i] = r < GROUP ? from[i] : 0;
#if BYTES
      b[s][i] = scaled(b[s][i], steps[i % 2 * 2], steps[i % 2 * 2 + 1]);
#endif
    }
  }
  __syncthreads();

  const int* ids = table + seq * table_seq;
  const unsigned char* base = codes + head * head_stride;
  const auto row_of = [&](int unit, int id) {
    return base + id * block_stride + (unit * UNIT % BLOCK + r) * ROW;
  };
  float most[2] = {-INFINITY, -INFINITY};
  float* to = out + ((i64{seq} * kv_heads + head) * GROUP + 2 * t) * n;
  int u = first + warp;
  Codes low, high;
  int id = 0;
  if (u < last) {
    const unsigned char* row = row_of(u, ids[u * UNIT / BLOCK]);
    read(low, row, t);
    read(high, row + 8 * ROW, t);
    if (u + WARPS < last) id = ids[(u + WARPS) * UNIT / BLOCK];
  }
  for (; u < last; u += WARPS) {
    Codes next_low, next_high;
    if (u + WARPS < last) {
      const unsigned char* row = row_of(u + WARPS, id);
      read(next_low, row, t);
      read(next_high, row + 8 * ROW, t);
      if (u + 2 * WARPS < last) id = ids[(u + 2 * WARPS) * UNIT / BLOCK];
    }
    float d[4] = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
      if constexpr (BYTES) {
        const u32* held = reinterpret_cast<const u32*>(shared);
#pragma unroll
        for (int i = 0; i < CODES; ++i) {
          const u32 x = held[code(low.word[s], i)], y = held[code(high.word[s], i)];
          mma(d, halves<0x4140>(x), halves<0x4140>(y), halves<0x4342>(x), halves<0x4342>(y), b[s][2 * i],
              b[s][2 * i + 1]);
        }
      } else if constexpr (WIDTH == 4) {
        const uint2* held = reinterpret_cast<const uint2*>(shared);
#pragma unroll
        for (int i = 0; i < CODES; ++i) {
          const uint2 x = held[code(low.word[s], i)], y = held[code(high.word[s], i)];
          mma(d, x.x, y.x, x.y, y.y, b[s][2 * i], b[s][2 * i + 1]);
        }
      } else {
        const u32* held = reinterpret_cast<const u32*>(shared);
#pragma unroll
        for (int i = 0; i < CODES; i += 2) {
          const u32 x0 = held[code(low.word[s], i)], x1 = held[code(low.word[s], i + 1)];
          const u32 y0 = held[code(high.word[s], i)], y1 = held[code(high.word[s], i + 1)];
          mma(d, x0, y0, x1, y1, b[s][i], b[s][i + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int h = 2 * t + i % 2, token = u * UNIT + r + i / 2 * 8;
      float x = d[i] * scale;
#if CAP
      x = softcap * tanhf(x / softcap);
#endif
      if (h < GROUP && token < count) {
        __stcs(to + i % 2 * n + token, x);
        most[i % 2] = fmaxf(most[i % 2], x);
      }
    }
    low = next_low, high = next_high;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x = most[i];
    for (int by = 4; by < 32; by *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
    const int h = 2 * t + i;
    if (r == 0 && h < GROUP && x > -INFINITY) atomicMax(top + (i64{seq} * kv_heads + head) * GROUP + h, ordered(x));
  }
}
