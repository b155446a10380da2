// Scores of one query token a sequence against sketches of keys, on tensor cores; and which tokens are wanted by them.
//
// A key is WORDS * 32 planes of one bit, in pairs of which the upper one is worth twice the lower. A thread masks one pair
// out of every byte of its words: four numbers from 0 to 3, as they are, make a register of the A operand of m16n8k32 over
// bytes, in which pair i counts 4^i. What the lower planes are worth to the query heads of a KV head is the B operand, in 8
// bits with a step that is 4^i smaller, so that the products of all pairs of a kind are counted alike. Pairs are ordered by
// what they are worth, so 8 bits are enough. 16 keys x 32 pairs are scored against up to 8 query heads by one instruction; a
// KV head of more has several.
//
// Sums start at 1.5 * 2^23 as a float's bits: adding to those bits adds to the float.
//
// Scores are powers of two from here on, less a `base` for each query head, which is about the bound that they have to
// reach: so they are added up as they come. Of a token only the highest score of its group is written, 16 bits.
// Choosing, which needs all of them beside bounds that are known by then, scores the few tokens again that may reach one.
//
// Constants: WARPS, WORDS (a multiple of 4), GROUP query heads a KV head (1 to 16), BLOCK tokens a block (a multiple of 16), CHUNK
// tokens a warp (a multiple of 32, whole blocks, at most 32), AHEAD pieces of keys on their way, THREADS of a
// program that chooses, EACH tokens of one at a time, FRESH, COLD, PIECES of a pool at most, D channels (a multiple of 16), F16 (0:
// bfloat16), CAP.

#include "half.cuh"

typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int PLANES = WORDS * 32;
constexpr int OWN = WORDS / 4;               // words of a thread
constexpr int TURNS = WORDS / 2;             // products over 32 pairs of planes each
constexpr int KINDS = OWN > 1 ? 2 : 1;       // of steps
constexpr int EIGHTS = (GROUP + 7) / 8;      // products for all query heads of a group
constexpr int LINE = 8 * EIGHTS;             // numbers of a group in tables
constexpr bool LIGHT = WORDS * EIGHTS <= 8;  // few registers are enough
constexpr int TILE = 32;                     // tokens of a warp at a time
constexpr u32 START = 0x4b400000;
constexpr float SHIFT = 12582912.f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NOTHING = -60000.f;  // the score of a head that is not there
constexpr u32 NOWHERE = 1 << 15;     // places are less, or there is none

// Which pair of planes, by its lower one, stands in byte b of the operand of thread t: of its first or second half, in
// turn i. Two words of a thread take four turns, a half each; one that is left over takes two: its pairs i and i + 2 are the halves.
__device__ __forceinline__ int plane_of(int t, int half, int b, int i) {
  const int word = i / 4 * 2, first = 32 * (t * OWN + word) + 8 * b + i % 4 * 2;
  return first + (word + 1 < OWN ? 32 : 4) * half;
}

// Into L2, for later.
__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// What every pair is worth to each query head, as operands: bq [rows, heads, EIGHTS, TURNS, 2, 32]; the steps, scales
// [rows, heads, LINE, KINDS]; what a key without planes scores, rest [rows, heads, LINE]; guess, like it: about what all tokens
// weigh, if planes are set by chance; base: as far above it as the last bound was, above [slots, heads * GROUP]; off, like
// guess: how much more a pool weighed in the last step, heard [slots, PIECES, heads * GROUP], than was estimated, told [slots,
// heads * GROUP]. One program a row and KV head.
extern "C" __global__ void __launch_bounds__(PLANES)
    weigh_planes(const Number* __restrict__ q, const Number* __restrict__ worth,
                 const float* __restrict__ lowest, const int* __restrict__ seq, u32* __restrict__ bq,
                 float* __restrict__ scales, float* __restrict__ rest, float* __restrict__ base,
                 float* __restrict__ guess, float* __restrict__ off, const float* __restrict__ above,
                 const float* __restrict__ told, const float* __restrict__ heard, float scale, float softcap,
                 i64 q_seq, i64 q_head) {
  __shared__ float products[LINE][PLANES + 8];
  __shared__ signed char codes[LINE][PLANES];
  __shared__ int top[GROUP][KINDS];
  __shared__ float moments[2][GROUP][PLANES / 32];
  const int head = blockIdx.x, heads = gridDim.x, row = blockIdx.y, p = threadIdx.x;
  const int lane = p % 32, g8 = lane / 4, t = lane % 4;
  const i64 line = (i64)row * heads + head, slot = (i64)seq[row] * heads + head;
  const Number* const own = q + row * q_seq + (i64)head * GROUP * q_head;
  for (int i = p; i < GROUP * KINDS; i += PLANES) top[i / KINDS][i % KINDS] = 0;
  {
    // 32 planes a warp; eight channels of a plane and of a head to a lane: which channels they are is all the same, as
    // long as they are the same ones. Channels come in parts that registers have room for
    constexpr int PARTS = (D + 31) / 32, PART = PARTS < 4 ? PARTS : 4;
    const Number* const from = worth + ((i64)head * PLANES + p / 32 * 32 + g8) * D + t * 8;
    float c[2][EIGHTS][4];
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS * 4; ++i) ((float*)c)[i] = 0.f;
#pragma unroll
    for (int first = 0; first < PARTS; first += PART) {
      uint4 planes[PART][4];
      auto there = [&](int k) { return first + k < PARTS && (D % 32 == 0 || (first + k) * 32 + t * 8 < D); };
#pragma unroll
      for (int k = 0; k < PART; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          planes[k][i] =
              there(k) ? __ldg((const uint4*)(from + i * 8 * D + (first + k) * 32)) : make_uint4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
      if (first == 0) {
        // nobody has read these since the last step
        if (p < PIECES) prefetch(heard + ((i64)seq[row] * PIECES + p) * heads * GROUP + head * GROUP);
        if (p < D / 8) prefetch(lowest + head * D + p * 8);
        if (p == 0) prefetch(above + slot * GROUP), prefetch(told + slot * GROUP);
        if (D > 128)
          for (int i = 0; i < 4; ++i) prefetch(from + i * 8 * D + 128 + t * ((D - 128) / 4 - 8));
        // what planes are worth is older than the kernel in front, the query is not: it is read from L2, since lines of
        // L1 may be of before the wait
        asm volatile("griddepcontrol.wait;" ::: "memory");
      }
#endif
      uint4 query[EIGHTS][PART];
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
        for (int k = 0; k < PART; ++k) {
          const int g = e * 8 + g8;
          query[e][k] = g < GROUP && there(k)
                            ? __ldcg((const uint4*)(own + g * q_head + (first + k) * 32 + t * 8))
                            : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
        for (int k = 0; k < PART; ++k) {
          const uint4 z = query[e][k];
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const uint4 x = planes[k][2 * tile], y = planes[k][2 * tile + 1];
            multiply(c[tile][e], x.x, y.x, x.y, y.y, z.x, z.y);
            multiply(c[tile][e], x.z, y.z, x.w, y.w, z.z, z.w);
          }
        }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          products[e * 8 + 2 * t + i % 2][p / 32 * 32 + tile * 16 + i / 2 * 8 + g8] = c[tile][e][i] * scale;
  }
  __syncthreads();
  float found[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; ++g) found[g] = products[g][p];
  const int bit = p % 8, kind = OWN % 2 && p / 32 % OWN == OWN - 1 ? 0 : bit / 4;
  const float small = 1.f / (1 << bit % 4);
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    float most = fabsf(found[g]) * small, one = found[g], two = found[g] * found[g];
    // lanes p and p + 8 have the same bit
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 8));
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 16));
    if (p % 32 < 8 && p % 2 == 0) atomicMax(&top[g][kind], __float_as_int(most));
    for (int i = 16; i; i /= 2) {
      one += __shfl_xor_sync(0xffffffff, one, i);
      two += __shfl_xor_sync(0xffffffff, two, i);
    }
    if (p % 32 == 0) moments[0][g][p / 32] = one, moments[1][g][p / 32] = two;
  }
  __syncthreads();
#pragma unroll
  for (int g = 0; g < LINE; ++g) {
    float code = 0.f;
    if (g < GROUP) {
      const float most = __int_as_float(top[g][kind]);
      if (most > 0.f) code = rintf(found[g] * small * (127.f / most));
    }
    codes[g][p] = (signed char)code;
  }
  if (p < GROUP * KINDS) {
    const int g = p / KINDS, k = p % KINDS;
    scales[(line * LINE + g) * KINDS + k] = __int_as_float(top[g][k]) / 127.f / (k ? 16.f : 1.f);
  }
  for (int g = p / 32; g < GROUP; g += PLANES / 32) {
    float sum = 0.f, parts[PIECES / 32], high = -INFINITY, all = 0.f;
#pragma unroll
    for (int i = 0; i < PIECES / 32; ++i) {
      parts[i] = heard[((i64)seq[row] * PIECES + i * 32 + p % 32) * heads * GROUP + head * GROUP + g];
      high = fmaxf(high, parts[i]);
    }
    for (int i = 16; i; i /= 2) high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, i));
#pragma unroll
    for (int i = 0; i < PIECES / 32; ++i) all += __expf(parts[i] - high);
    for (int i = 16; i; i /= 2) all += __shfl_xor_sync(0xffffffff, all, i);
    for (int i = p % 32; i < D; i += 32)
      sum += wide(__ldcg(own + g * q_head + i)) * scale * lowest[head * D + i];
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    if (p % 32 == 0) {
      rest[line * LINE + g] = sum;
      float one = 0.f, two = 0.f;
      for (int i = 0; i < PLANES / 32; ++i) one += moments[0][g][i], two += moments[1][g][i];
      // the logarithm of the mean of a Gaussian's powers; past a few deviations there are no tokens for it
      const float spread = sqrtf(two) / 2;
      const float mean = sum + one / 2 + (spread < 4.f ? spread * spread / 2 : 4.f * spread - 8.f);
      const float known = above[slot * GROUP + g], own = CAP ? softcap * tanhf(mean / softcap) : mean;
      const float more = high + __logf(all) - told[slot * GROUP + g];
      off[line * GROUP + g] = fabsf(more) < 1e30f ? more : 0.f;
      guess[line * GROUP + g] = own;
      base[line * LINE + g] = own + (fabsf(known) < 1e30f ? known : 0.f);
    }
  }
  __syncthreads();
  for (int i = p; i < EIGHTS * TURNS * 64; i += PLANES) {
    const int half = i / 32 % 2, turn = i / 64 % TURNS, g = i / 64 / TURNS * 8 + g8;
    u32 word = 0;
    for (int b = 0; b < 4; ++b) word |= (u32)(unsigned char)codes[g][plane_of(t, half, b, turn)] << 8 * b;
    bq[line * EIGHTS * TURNS * 64 + i] = word;
  }
}

// d = a * b + c.
__device__ __forceinline__ void multiply_bytes(u32* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, u32 c0,
                                               u32 c1, u32 c2, u32 c3) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};\n"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 higher(u32 x, u32 y) {
  u32 z;
  asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// What a lane has to know of a query: lane 4 g + t scores tokens for heads 2 t and 2 t + 1 of each eight, its *own* heads.
struct Query {
  u32 b[EIGHTS][TURNS][2];
  float step[2 * EIGHTS][KINDS], start[2 * EIGHTS], base[2 * EIGHTS], softcap;

  // The head of a group that is number c of a lane's own.
  static __device__ __forceinline__ int head(int lane, int c) { return c / 2 * 8 + 2 * (lane % 4) + c % 2; }

  __device__ __forceinline__ Query(const u32* bq, const float* scales, const float* rest, const float* bases,
                                   i64 line, int lane, float cap)
      : softcap(cap) {
#pragma unroll
    for (int e = 0; e < EIGHTS; ++e)
#pragma unroll
      for (int i = 0; i < TURNS * 2; ++i)
        b[e][i / 2][i % 2] = bq[(line * EIGHTS + e) * TURNS * 64 + i * 32 + lane];
#pragma unroll
    for (int c = 0; c < 2 * EIGHTS; ++c) {
      const int own = head(lane, c);
      const bool real = own < GROUP;
      base[c] = real ? bases[line * LINE + own] : 0.f;
      start[c] = !real ? NOTHING
                 : CAP ? rest[line * LINE + own]
                       : (rest[line * LINE + own] - base[c]) * LOG2E;
#pragma unroll
      for (int k = 0; k < KINDS; ++k) {
        step[c][k] = real ? scales[(line * LINE + own) * KINDS + k] * (CAP ? 1.f : LOG2E) : 0.f;
        start[c] -= SHIFT * step[c][k];
      }
    }
  }

  // Scores of two tokens, words x and y: out[token][own head].
  __device__ __forceinline__ void score(const u32* x, const u32* y, float (*out)[2 * EIGHTS]) const {
    u32 d[EIGHTS][KINDS][4];
    auto add = [&](int kind, int turn, u32 a0, u32 a1, u32 a2, u32 a3) {
#pragma unroll
      for (int e = 0; e < EIGHTS; ++e) {
        u32* const to = d[e][kind];
        const u32 *const z = b[e][turn], fresh[4] = {START, START, START, START};
        const u32* const c = turn == 2 * kind ? fresh : to;
        multiply_bytes(to, a0, a1, a2, a3, z[0], z[1], c[0], c[1], c[2], c[3]);
      }
    };
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int word = i / 4 * 2, bits = i % 4 * 2;
      const u32 mask = 0x03030303u << bits;
      if (word + 1 < OWN)
        add(bits / 4, i, x[word] & mask, y[word] & mask, x[word + 1] & mask, y[word + 1] & mask);
      else
        add(0, i, x[word] & mask, y[word] & mask, (x[word] >> 4) & mask, (y[word] >> 4) & mask);
    }
#pragma unroll
    for (int c = 0; c < 2 * EIGHTS; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float found = start[c];
#pragma unroll
        for (int k = 0; k < KINDS; ++k)
          found = fmaf(__uint_as_float(d[c / 2][k][2 * i + c % 2]), step[c][k], found);
#if CAP
        found = found < NOTHING / 2 ? found : (softcap * tanhf(found / softcap) - base[c]) * LOG2E;
#endif
        out[i][c] = found;
      }
  }
};

// The highest of a lane's own heads.
__device__ __forceinline__ float highest_of(const float* own) {
  float most = fmaxf(own[0], own[1]);
#pragma unroll
  for (int c = 2; c < 2 * EIGHTS; ++c) most = fmaxf(most, own[c]);
  return most;
}

template <int N>
__device__ __forceinline__ void read_words(u32* to, const u32* from) {
  if (N == 2) {
    const uint2 v = __ldg((const uint2*)from);
    to[0] = v.x, to[N - 1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = __ldg(from + i);
  }
}

constexpr int COPIES = TILE * WORDS / 4;  // of 16 bytes, of a tile of keys

__device__ __forceinline__ u32 shared_address(const void* x) {
  return (u32)__cvta_generic_to_shared(x);
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
// The copies since the last call are a group.
__device__ __forceinline__ void copies_end() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// All groups but the last N are there.
template <int N>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// best [slots, heads, most] float16: the highest score of a token's heads, nothing for those of the pool that are
// attended to anyway; lse, inside [rows, chunks, heads * GROUP]: natural logarithms of what tokens weigh that are not,
// and that are. Where the last bound is known, which above [slots, heads * GROUP] says, tokens of the pool that are at
// most `touch` below it get young, and are cold no more. A warp for each chunk and head, the heads of a chunk side by
// side: so what they read lies side by side. It comes through shared memory, AHEAD tiles on their way.
extern "C" __global__ void __launch_bounds__(WARPS * 32, (LIGHT ? 24 : 16) / WARPS)
    score_sketch(const u32* __restrict__ bq, const float* __restrict__ scales, const float* __restrict__ rest,
                 const float* __restrict__ base, const u32* __restrict__ kept, const int* __restrict__ table,
                 const int* __restrict__ tokens, const int* __restrict__ seq, short* __restrict__ place_of,
                 unsigned short* __restrict__ best, float* __restrict__ lse, float* __restrict__ inside,
                 const float* __restrict__ above, int* __restrict__ age, const int* __restrict__ clock,
                 float softcap, float touch, int heads, int n, int chunks, int most, int places,
                 i64 block_stride, i64 head_stride, i64 table_seq) {
  __shared__ uint4 ring[WARPS][AHEAD][COPIES];
  __shared__ uint4 spots[WARPS][AHEAD][TILE / 8];
  const int row = blockIdx.z, warp = threadIdx.x / 32, head = blockIdx.y * WARPS + warp;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, mine = t * 8 + g;
  const int chunk = blockIdx.x;
  if (head >= heads) return;
  const int start = chunk * CHUNK, count = min(tokens[row], n), end = min(start + CHUNK, count);
  const i64 line = (i64)row * heads + head, pool = (i64)seq[row] * heads + head;
  const i64 said = ((i64)row * chunks + chunk) * heads * GROUP + head * GROUP;
  if (start >= count) {
    if (lane < GROUP) lse[said + lane] = inside[said + lane] = -INFINITY;
    return;
  }
  // where the blocks of the chunk begin, in the lanes' registers, in units of 16 bytes
  const u32 known = start + lane * BLOCK < end
                        ? table[row * table_seq + start / BLOCK + lane] * (u32)(block_stride / 4)
                        : 0;
  const uint4* const keys = (const uint4*)(kept + head * head_stride);
  const short* where = place_of + pool * most + start + lane * 8;
  const u32 size = end - start, to_keys = shared_address(&ring[warp][0][lane]),
            to_spots = shared_address(&spots[warp][0][lane]);
  auto fetch = [&](u32 stage, u32 at, const short* places_at) {
    if (at < size) {
#pragma unroll
      for (u32 i = 0; i < COPIES; i += 32) {
        u32 from;
        if (BLOCK % TILE == 0) {
          from = __shfl_sync(0xffffffff, known, at / BLOCK) + at % BLOCK * (WORDS / 4) + i + lane;
        } else {
          const u32 token = at + (i + lane) / (WORDS / 4);
          from = __shfl_sync(0xffffffff, known, token / BLOCK) + token % BLOCK * (WORDS / 4) +
                 lane % (WORDS / 4);
        }
        copy16(to_keys + (stage * COPIES + i) * 16, keys + from);
      }
      if (lane < TILE / 8) copy16(to_spots + stage * (TILE / 8) * 16, places_at);
    }
    copies_end();
  };
#pragma unroll
  for (u32 j = 0; j < AHEAD; ++j) fetch(j, j * TILE, where + j * TILE);
  const Query query(bq, scales, rest, base, line, lane, softcap);
  const float young = fabsf(above[pool * GROUP]) < 1e30f ? -touch * LOG2E : INFINITY;
  const int step = clock[pool];
  const u32 first_age = (u32)pool * places;
  float all[2 * EIGHTS], out[2 * EIGHTS];
#pragma unroll
  for (int c = 0; c < 2 * EIGHTS; ++c) all[c] = out[c] = 0.f;
  unsigned short* to = best + pool * most + start + mine;
  short* spot = place_of + pool * most + start + mine;
  const unsigned short nothing = (unsigned short)halves(NOTHING, NOTHING);
  // stages in a row, so that each knows where its tile lies
  for (u32 first = 0; first < size; first += TILE * AHEAD) {
#pragma unroll
    for (u32 stage = 0; stage < AHEAD; ++stage) {
      const u32 at = first + stage * TILE;
      if (at >= size) break;
      copies_wait<AHEAD - 1>();
      __syncwarp();
      u32 words[4][OWN];
      const u32* const own = (const u32*)ring[warp][stage] + lane * OWN;
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int k = 0; k < OWN; ++k) words[i][k] = own[i * 8 * WORDS + k];
      const u32 place = ((const unsigned short*)spots[warp][stage])[mine];
      __syncwarp();
      fetch(stage, at + TILE * AHEAD, where + (stage + AHEAD) * TILE);
      float score[4][2 * EIGHTS];
      query.score(words[0], words[1], score);
      query.score(words[2], words[3], score + 2);
      if (at + TILE > size) {
        // past the end
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (at + 8 * i + g >= size)
#pragma unroll
            for (int c = 0; c < 2 * EIGHTS; ++c) score[i][c] = NOTHING;
      }
      // bit 4 g + t is of token 8 t + g, so those of tokens g, 8 + g, .. are side by side
      const bool apart = place >= COLD;
      const u32 outside = __ballot_sync(0xffffffff, apart) >> 4 * g;
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 2 * EIGHTS; ++c) {
          const float weight = power(score[i][c]);
          all[c] += weight;
          if (outside >> i & 1) out[c] += weight;
        }
      // the highest of a token's heads, which four lanes have: each pair of lanes goes on with two of four tokens
      const u32 lower = halves(highest_of(score[0]), highest_of(score[1]));
      const u32 upper = halves(highest_of(score[2]), highest_of(score[3]));
      u32 both = higher(t & 2 ? upper : lower, __shfl_xor_sync(0xffffffff, t & 2 ? lower : upper, 2));
      both = higher(both, __shfl_xor_sync(0xffffffff, both, 1));
      const unsigned short highest = both >> 16 * (t & 1);
      to[stage * TILE] = apart ? highest : nothing;
      if (place < NOWHERE && from_half(highest) >= young) {
        age[first_age + place % COLD] = step;
        if (apart) spot[stage * TILE] = (short)(place % COLD);
      }
    }
    to += TILE * AHEAD, spot += TILE * AHEAD, where += TILE * AHEAD;
  }
#pragma unroll
  for (int c = 0; c < 2 * EIGHTS; ++c) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) {
      all[c] += __shfl_xor_sync(0xffffffff, all[c], i);
      out[c] += __shfl_xor_sync(0xffffffff, out[c], i);
    }
    const int its = Query::head(lane, c);
    if (g == 0 && its < GROUP) {
      // what is left of a difference of nearly equal numbers is nothing
      const float in = all[c] - out[c] > 1e-6f * all[c] ? all[c] - out[c] : 0.f;
      lse[said + its] = query.base[c] + __logf(fminf(out[c], 1e38f));
      inside[said + its] = query.base[c] + __logf(fminf(in, 1e38f));
    }
  }
}

// Which tokens are wanted: those of which any head's score reaches its bound. A program looks at whole chunks, a window
// at a time: first at the highest scores, then it scores again what may reach a bound, each warp its part of the list.
//
// bound [rows, heads * GROUP]; ids [rows, heads, n]: tokens whose score is `wait` [rows] above a bound, from the first of each split's on, and those that lie cold
// in a pool and reach a bound, from the last one back; later [rows, heads, splits, FRESH]: the others that are `far` above
// it, or `wait` if that is less, as many as may come into a pool; count [rows, heads, splits, 3]: how many at once, later, cold; tail [rows, splits,
// heads * GROUP]: what all weigh that are neither attended to in a pool nor in ids. Those that lay cold are young then, and cold no more.
extern "C" __global__ void __launch_bounds__(THREADS, (LIGHT ? 640 : 512) / THREADS)
    choose_scored(const u32* __restrict__ bq, const float* __restrict__ scales,
                  const float* __restrict__ rest, const float* __restrict__ base,
                  const u32* __restrict__ kept, const int* __restrict__ table, const int* __restrict__ tokens,
                  const int* __restrict__ seq, short* __restrict__ place_of, int* __restrict__ age,
                  const int* __restrict__ clock, const unsigned short* __restrict__ best,
                  const float* __restrict__ lse, const float* __restrict__ bound, int* __restrict__ ids,
                  int* __restrict__ later, int* __restrict__ count, float* __restrict__ tail, float softcap,
                  const float* __restrict__ wait, float far, int n, int chunks, int most, int places,
                  i64 block_stride, i64 head_stride, i64 table_seq) {
  constexpr int TEAM = THREADS / 32, WINDOW = THREADS * EACH, AT_ONCE = 3, LOADS = EACH / 8;
  constexpr u32 LATER = 1 << 14, NEAR = 1 << 15, PLACE = LATER - 1;
  static_assert(WINDOW <= LATER, "a token's number in a window has 14 bits");
  __shared__ unsigned short list[WINDOW];
  __shared__ int sums[TEAM], votes[TEAM][3];
  __shared__ float weights[TEAM][LINE], lefts[LINE];
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int there = min(tokens[row], n), each = ((there + CHUNK - 1) / CHUNK + splits - 1) / splits * CHUNK;
  const int first = split * each, last = min(first + each, there);
  const i64 line = (i64)row * heads + head, pool = (i64)seq[row] * heads + head;
  short* const where = place_of + pool * most;
  int* const ages = age + pool * places;
  const int step = clock[pool];
  const unsigned short* const highest = best + pool * most;
  const u32* const from = kept + head * head_stride + t * OWN;
  const int* const blocks = table + row * table_seq;
  int *const mine = ids + line * n + first, *const back = ids + line * n + last - 1;

  // A thread's tokens of a window. Their bound may be on its way yet, the scan is over.
  uint4 scores[LOADS];
  auto load = [&](int at) {
    const int token = at + threadIdx.x * EACH;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      if (token < last) scores[i] = __ldg((const uint4*)(highest + token) + i);
  };
  load(first);
  const int chunk = first / CHUNK, parts = first < last ? (last - first + CHUNK - 1) / CHUNK : 0;
  for (int i = warp; i < GROUP; i += TEAM) {
    const float own = base[line * LINE + i];
    float left = 0.f;
    for (int c = lane; c < parts; c += 32)
      left += __expf(lse[((i64)row * chunks + chunk + c) * heads * GROUP + head * GROUP + i] - own);
    for (int j = 16; j; j /= 2) left += __shfl_xor_sync(0xffffffff, left, j);
    if (lane == 0) lefts[i] = left;
  }
  const Query query(bq, scales, rest, base, line, lane, softcap);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const float now = wait[row] * LOG2E;
  far = fminf(far * LOG2E, now);
  auto limit_of = [&](int i) { return (__ldcg(bound + line * GROUP + i) - base[line * LINE + i]) * LOG2E; };
  float least = INFINITY, limit[2 * EIGHTS], taken[2 * EIGHTS];
  for (int i = 0; i < GROUP; ++i) least = fminf(least, limit_of(i));
#pragma unroll
  for (int c = 0; c < 2 * EIGHTS; ++c) {
    const int its = Query::head(lane, c);
    limit[c] = its < GROUP ? limit_of(its) : INFINITY, taken[c] = 0.f;
  }
  // 16 bits have rounded; tokens of the pool have no score
  least = fmaxf(least - 0.06f - fabsf(least) * 1e-3f, NOTHING + 1000.f);
  int here = 0, coming = 0, near = 0;
  for (int at = first; at < last; at += WINDOW) {
    const int token = at + threadIdx.x * EACH;
    u32 marks = 0;
    if (token < last) {
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const u32 word = ((const u32*)scores)[i / 2];
        const float score = from_half((unsigned short)(word >> 16 * (i % 2)));
        marks |= (u32)(token + i < last && score >= least) << i;
      }
    }
    const int own = __popc(marks);
    int before = own, found = 0;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(0xffffffff, before, i);
      if (lane >= i) before += other;
    }
    if (lane == 31) sums[warp] = before;
    __syncthreads();
    before -= own;
#pragma unroll
    for (int w = 0; w < TEAM; ++w) {
      const int others = sums[w];
      if (w < warp) before += others;
      found += others;
    }
    for (; marks; marks &= marks - 1)
      list[before++] = (unsigned short)(threadIdx.x * EACH + __ffs(marks) - 1);
    __syncthreads();
    // a warp's part of the list, which it makes shorter: what is left of it is wanted
    const int part = (found + TEAM * 16 - 1) / (TEAM * 16) * 16;
    const int low = min(warp * part, found), high = min(low + part, found);
    int left = 0, put_off = 0, cold = 0;
    for (int i = low; i < high; i += 16 * AT_ONCE) {
      u32 entry[AT_ONCE][2], words[AT_ONCE][2][OWN];
      bool real[AT_ONCE][2], lies[AT_ONCE][2];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const int number = i + 16 * j + 8 * k + g;
          real[j][k] = number < high;
          entry[j][k] = real[j][k] ? list[number] : 0;
#pragma unroll
          for (int w = 0; w < OWN; ++w) words[j][k][w] = 0;
          lies[j][k] = false;
          if (real[j][k]) {
            const int its = at + (int)entry[j][k];
            lies[j][k] = where[its] >= 0;
            read_words<OWN>(words[j][k], from + __ldg(blocks + (u32)its / BLOCK) * block_stride +
                                             (u32)its % BLOCK * WORDS);
          }
        }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (i + 16 * j >= high) break;
        float score[2][2 * EIGHTS];
        query.score(words[j][0], words[j][1], score);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float above[2 * EIGHTS];
#pragma unroll
          for (int c = 0; c < 2 * EIGHTS; ++c) above[c] = score[k][c] - limit[c];
          float margin = highest_of(above);
          margin = fmaxf(margin, __shfl_xor_sync(0xffffffff, margin, 1));
          margin = fmaxf(margin, __shfl_xor_sync(0xffffffff, margin, 2));
          const bool wanted = real[j][k] && margin >= (lies[j][k] ? 0.f : far),
                     at_once = wanted && (margin >= now || lies[j][k]);
          if (at_once)
#pragma unroll
            for (int c = 0; c < 2 * EIGHTS; ++c) taken[c] += power(score[k][c]);
          const u32 all = __ballot_sync(0xffffffff, wanted && t == 0);
          if (wanted && t == 0)
            list[low + left + __popc(all & ((1u << lane) - 1))] =
                (unsigned short)(entry[j][k] | (lies[j][k] ? NEAR
                                                : at_once  ? 0
                                                           : LATER));
          left += __popc(all);
          cold += __popc(__ballot_sync(0xffffffff, wanted && lies[j][k] && t == 0));
          put_off += __popc(__ballot_sync(0xffffffff, wanted && !at_once && t == 0));
        }
      }
    }
    if (lane == 0) votes[warp][0] = left - put_off - cold, votes[warp][1] = put_off, votes[warp][2] = cold;
    __syncthreads();
    int to[3] = {here, coming, near};
#pragma unroll
    for (int w = 0; w < TEAM; ++w) {
      if (w < warp) to[0] += votes[w][0], to[1] += votes[w][1], to[2] += votes[w][2];
      here += votes[w][0], coming += votes[w][1], near += votes[w][2];
    }
    for (int i = 0; i < left; i += 32) {
      const bool real = i + lane < left;
      const u32 entry = real ? list[low + i + lane] : 0;
      const bool postponed = real && (entry & LATER), close = real && (entry & NEAR);
      const u32 second = __ballot_sync(0xffffffff, postponed), third = __ballot_sync(0xffffffff, close),
                one = __ballot_sync(0xffffffff, real) & ~second & ~third;
      const u32 below = (1u << lane) - 1;
      if (one >> lane & 1) mine[to[0] + __popc(one & below)] = at + (int)(entry & PLACE);
      if (close) {
        const int its = at + (int)(entry & PLACE), place = where[its] % COLD;
        back[-(to[2] + __popc(third & below))] = its;
        where[its] = (short)place;
        ages[place] = step;
      }
      if (postponed) {
        const int slot = to[1] + __popc(second & below);
        if (slot < FRESH) later[(line * splits + split) * FRESH + slot] = at + (int)(entry & PLACE);
      }
      to[0] += __popc(one), to[1] += __popc(second), to[2] += __popc(third);
    }
    load(at + WINDOW);
    __syncthreads();
  }
#pragma unroll
  for (int c = 0; c < 2 * EIGHTS; ++c) {
#pragma unroll
    for (int i = 4; i < 32; i *= 2) taken[c] += __shfl_xor_sync(0xffffffff, taken[c], i);
    if (g == 0) weights[warp][Query::head(lane, c)] = taken[c];
  }
  __syncthreads();
  if (threadIdx.x < GROUP) {
    const float own = base[line * LINE + threadIdx.x], all = lefts[threadIdx.x];
    float left = all;
    for (int w = 0; w < TEAM; ++w) left -= weights[w][threadIdx.x];
    // what is left of a difference of nearly equal numbers is nothing
    tail[((i64)row * splits + split) * heads * GROUP + head * GROUP + threadIdx.x] =
        left > 1e-5f * all ? own + __logf(left) : -INFINITY;
  }
  if (threadIdx.x == 0) {
    int* const counts = count + (line * splits + split) * 3;
    counts[0] = here, counts[1] = min(coming, FRESH), counts[2] = near;
  }
}
