// Scores of one query token a sequence against product-quantised keys, on tensor cores.
//
// The codebook lies in shared memory. A thread reads the codes of a row (a key) as they lie, 16 bytes at a
// time, and what it finds under a code is, as it is, one register of the A operand of m16n8k16: lane 4r + t
// owns two columns of row r, and which channels stand in a column is ours to choose, as long as the query's
// operand is ordered alike. So 16 keys x 16 channels are scored against up to 8 query heads by one
// instruction, in float32.
//
// Bound: random 8-byte reads of shared memory serve about 16 lanes in 3.1 cycles (bank conflicts), 4-byte
// reads 32 lanes in 3.5.
//
// Constants: THREADS of a program, BITS of a code, GROUPS of channels, WIDTH channels each (2 or 4), GROUP
// query heads a KV head (1 to 8), BLOCK tokens a block (a multiple of 16), COUNT centroids, F16 (0:
// bfloat16), CAP (soft-capped scores).

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int CODES = GROUPS % 32 == 0 ? 8 : 4;  // of one thread in one strip of a row
constexpr int STRIPS = GROUPS / (4 * CODES);
constexpr int ROW = GROUPS * BITS / 8;
constexpr int SHIFT = BITS == 16 ? 0
                      : CODES == 8
                          ? (8 * BITS * 3) % 32 > (8 * BITS) % 32 ? (8 * BITS * 3) % 32 : (8 * BITS) % 32
                          : 28;
constexpr int WORDS = BITS == 16 ? CODES / 2 : (SHIFT + CODES * BITS + 31) / 32;
constexpr bool SPLIT = WIDTH == 4 && GROUP <= 4;
constexpr int PAIRS = SPLIT ? CODES : CODES * WIDTH / 2;  // registers of the query's operand for a strip
constexpr int WARPS = THREADS / 32, UNIT = 16;
constexpr int LOG = WIDTH == 4 ? 3 : 2;  // of a centroid's bytes
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

// Where the centroid of code i lies in shared memory.
__device__ __forceinline__ u32 where(u32 base, const u32 (&word)[WORDS], int i) {
  const int bit = i * BITS, at = bit / 32, r = bit % 32;
  // a code of 13 bits leaves the three below the next one zero
  if (BITS == 16 && COUNT <= 8192 && r == 16) return base + (word[at] >> (16 - LOG));
  const u32 x =
      r + BITS <= 32 ? word[at] >> r : __funnelshift_r(word[at], word[at + 1 < WORDS ? at + 1 : at], r);
  return base + ((x & MASK) << LOG);
}

__device__ __forceinline__ u32 look(u32 at) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}

__device__ __forceinline__ uint2 look2(u32 at) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
  return x;
}

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if F16
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 keys, one strip: `low` are codes of row r, `high` of row r + 8.
__device__ __forceinline__ void score(float (&d)[4], const u32 (&low)[WORDS], const u32 (&high)[WORDS],
                                      u32 base, const u32 (&b)[PAIRS]) {
  if constexpr (WIDTH == 4) {
#pragma unroll
    for (int i = 0; i < CODES; ++i) {
      const uint2 x = look2(where(base, low, i)), y = look2(where(base, high, i));
      mma(d, x.x, y.x, x.y, y.y, b[2 * i], b[2 * i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < CODES; i += 2) {
      const u32 x0 = look(where(base, low, i)), x1 = look(where(base, low, i + 1));
      const u32 y0 = look(where(base, high, i)), y1 = look(where(base, high, i + 1));
      mma(d, x0, y0, x1, y1, b[i], b[i + 1]);
    }
  }
}

// 8 keys, one strip. A centroid's two registers are neighbours, as they come from memory: the first half of
// its channels in row r, the second in row r + 8, against the query's first half in columns 0 to 3 and second
// in 4 to 7.
__device__ __forceinline__ void score_split(float (&d)[4], const u32 (&word)[WORDS], u32 base,
                                            const u32 (&b)[PAIRS]) {
#pragma unroll
  for (int i = 0; i < CODES; i += 2) {
    const uint2 x = look2(where(base, word, i)), y = look2(where(base, word, i + 1));
    mma(d, x.x, x.y, y.x, y.y, b[i], b[i + 1]);
  }
}

// Floats as integers of the same order.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    score_pq(const u16* q, const unsigned char* codes, const uint4* book, const int* table, const int* tokens,
             float* out, u32* top, float scale, float softcap, int q_seq, int q_head, int block_stride,
             int head_stride, int table_seq, i64 n, int kv_heads) {
  extern __shared__ uint4 shared[];
#if __CUDA_ARCH__ >= 900
  // The codebook is nobody's result: it may be on its way while the kernel in front of this one ends.
  asm volatile("griddepcontrol.launch_dependents;");
#endif
#pragma unroll 4
  for (int i = threadIdx.x; i < COUNT * WIDTH * 2 / 16; i += THREADS) shared[i] = book[i];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const u32 seq = blockIdx.z, head = blockIdx.y, count = tokens[seq];
  const u32 units = (count + UNIT - 1) / UNIT, each = (units + gridDim.x - 1) / gridDim.x;
  const u32 first = blockIdx.x * each, last = min(first + each, units);
  if (first >= last) return;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4, r = lane / 4;
  const int* ids = table + i64{seq} * table_seq;
  const unsigned char* rows = codes + i64{head} * head_stride + r * ROW;
  const auto fetch = [&](Codes(&to)[2], u32 unit, u32 id) {
    const unsigned char* row = rows + static_cast<unsigned long long>(id) * static_cast<u32>(block_stride) +
                               unit * UNIT % BLOCK * ROW;
    read(to[0], row, t);
    read(to[1], row + 8 * ROW, t);
  };

  u32 u = first + warp, id = 0;
  Codes even[2], odd[2];
  if (u < last) fetch(even, u, ids[u * UNIT / BLOCK]);
  if (u + WARPS < last) id = ids[(u + WARPS) * UNIT / BLOCK];

  // the query's operand: a column is a query head of the group, rows are ordered as the thread's own channels
  u32 b[STRIPS][PAIRS];
  const u32 column = SPLIT ? r % 4 : r;
  const u32* query = reinterpret_cast<const u32*>(q + i64{seq} * q_seq + (head * GROUP + column) * q_head);
#pragma unroll
  for (int s = 0; s < STRIPS; ++s) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const u32 pair = SPLIT ? ((s * 4 + t) * CODES + i) * 2 + r / 4 : (s * 4 + t) * PAIRS + i;
      b[s][i] = column < GROUP ? query[pair] : 0;
    }
  }
  __syncthreads();

  const u32 base = static_cast<u32>(__cvta_generic_to_shared(shared));
  const bool owns[2] = {2 * t < GROUP, 2 * t + 1 < GROUP};
  float most[2] = {-INFINITY, -INFINITY};
  float* to = out + ((i64{seq} * kv_heads + head) * GROUP + 2 * t) * n + r;
  const auto work = [&](const Codes(&held)[2], u32 unit) {
    float d[4] = {0, 0, 0, 0};  // key r: heads 2t, 2t + 1; key r + 8: the same
    if constexpr (SPLIT) {
      float e[4] = {0, 0, 0, 0};
#pragma unroll
      for (int s = 0; s < STRIPS; ++s) {
        score_split(d, held[0].word[s], base, b[s]);
        score_split(e, held[1].word[s], base, b[s]);
      }
      d[0] += __shfl_down_sync(0xffffffffu, d[2], 2);
      d[1] += __shfl_down_sync(0xffffffffu, d[3], 2);
      d[2] = e[0] + __shfl_down_sync(0xffffffffu, e[2], 2);
      d[3] = e[1] + __shfl_down_sync(0xffffffffu, e[3], 2);
    } else {
#pragma unroll
      for (int s = 0; s < STRIPS; ++s) score(d, held[0].word[s], held[1].word[s], base, b[s]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      d[i] *= scale;
#if CAP
      d[i] = softcap * tanhf(d[i] / softcap);
#endif
    }
    const u32 at = unit * UNIT;
    float* here = to + at;
    const bool there[2] = {at + r < count, at + r + 8 < count};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!owns[i % 2] || !there[i / 2]) continue;
      __stcs(here + i % 2 * n + i / 2 * 8, d[i]);
      most[i % 2] = fmaxf(most[i % 2], d[i]);
    }
  };
  // codes of the next unit arrive while one is scored; two sets of registers take turns
  const auto turn = [&](const Codes(&held)[2], Codes(&next)[2]) {
    if (u + WARPS < last) fetch(next, u + WARPS, id);
    if (u + 2 * WARPS < last) id = ids[(u + 2 * WARPS) * UNIT / BLOCK];
    work(held, u);
    u += WARPS;
  };
  while (u < last) {
    turn(even, odd);
    if (u >= last) break;
    turn(odd, even);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x = most[i];
    for (int by = 4; by < 32; by *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
    if (r == 0 && owns[i] && x > -INFINITY)
      atomicMax(top + (i64{seq} * kv_heads + head) * GROUP + 2 * t + i, ordered(x));
  }
}
