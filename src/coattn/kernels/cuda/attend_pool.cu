// Attention of one query token a sequence over pools of single tokens in 8 bits (`quantise/rows.py`), on tensor cores.
//
// Keys and values are the left operands: a thread loads 16 bytes of a key, which are its channels of four products, as often as
// that goes, then 4 bytes for each product that is left; and an eighth of the channels of four values, of which it puts two
// tokens side by side. Which channel or token counts as which is
// all the same, as long as both operands agree. Bytes become float16 by their bits: 1024 + code is 0x6400 | code. A warp has
// 16 listed tokens at a time, and the next 16 are on their way; nothing goes through shared memory but the sums at the end.
//
// Scores are powers of two less the highest so far, which is only looked for when a score is far above it.
//
// `attend_near` attends to the window's blocks, which are few and in the model's own numbers: a thread has 32 channels of a
// token, or of two, then two channels of some values. All that it reads is on its way at once.
//
// Several programs share a KV head of more than 8 query heads, and with them what they read: to all that follows, each one's query
// heads are a group, and its part of a KV head is a head.
//
// Constants: WARPS, GROUP query heads of a program (1 to 8), SHARE programs that share a KV head, D channels (a multiple of 16,
// from 64 to 256), BLOCK tokens a block, F16 (0: bfloat16), CAP, WINDOW tokens of a program, PIECES of a pool at most, COLD.

#include "half.cuh"

typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int TILE = 16;
constexpr int TURNS = D / 16;      // products over 16 channels of a key
constexpr int WHOLE = D / 64 * 4;  // of those, whose channels come in pieces of 16 bytes
constexpr int WORDS = D / 8 / 4;   // numbers of 4 bytes of a value that a thread has
constexpr bool PAIR = D / 8 % 4;   // and two bytes more
constexpr bool TWICE = D <= 128;   // registers have room for the rows that are attended and the next ones
constexpr float LOG2E = 1.4426950408889634f;
constexpr float MOST = 4.f;    // powers of two that a score may be above what counts as highest
constexpr float LIFT = 256.f;  // of weights in float16, whose smallest number is 2^-24

// c += a * b over float16: 16 x 16 by 16 x 8.
__device__ __forceinline__ void multiply16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Bytes 0 and 1, or 2 and 3, of a word of codes as two numbers.
__device__ __forceinline__ u32 numbers(u32 word, u32 which) {
  u32 y;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(word), "r"(0x64646464u), "r"(which));
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(y) : "r"(0x64806480u));  // 1152
  return y;
}
constexpr u32 LOW = 0x5140, HIGH = 0x5342;

// Byte `which` of two words as two numbers.
__device__ __forceinline__ u32 both_numbers(u32 x, u32 y, int which) {
  u32 z;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x4400 + 0x1111 * which));
  z = (z & 0x00ff00ff) | 0x64006400;
  asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(z) : "r"(0x64806480u));
  return z;
}

__device__ __forceinline__ u32 turned(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// A thread's first channel of four in product i over keys, and of two in product i over values.
__device__ __forceinline__ int key_channel(int i, int t) {
  return i < WHOLE ? i / 4 * 64 + t * 16 + i % 4 * 4 : WHOLE * 16 + t * (TURNS - WHOLE) * 4 + (i - WHOLE) * 4;
}
__device__ __forceinline__ int value_channel(int i, int g) {
  return i < 2 * WORDS ? g * 4 * WORDS + 2 * i : 32 * WORDS + 2 * g;
}

struct Rows {
  alignas(16) u32 k[2][TURNS];
  alignas(16) u32 v[4][WORDS + PAIR];
  float k_scale[2], v_scale[2];
};

// Lane i has the place of token i % 16. A thread has tokens `token` and `token + 2` of keys, and four of values.
__device__ __forceinline__ void load_keys(Rows& to, const unsigned char* keys, const unsigned short* scales,
                                          int place, int token, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = __shfl_sync(0xffffffff, place, token + 2 * i);
    const unsigned char* const own = keys + (u32)at * D;
#pragma unroll
    for (int w = 0; w < WHOLE; w += 4)
      *(uint4*)&to.k[i][w] = __ldcs((const uint4*)(own + key_channel(w, lane % 4)));
#pragma unroll
    for (int w = WHOLE; w < TURNS; ++w) to.k[i][w] = __ldcs((const u32*)(own + key_channel(w, lane % 4)));
    to.k_scale[i] = from_half(scales[at]);
  }
}
__device__ __forceinline__ void load_values(Rows& to, const unsigned char* values,
                                            const unsigned short* scales, int place, int token, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    to.v_scale[i] = from_half(scales[__shfl_sync(0xffffffff, place, token + 2 * i)]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned char* const own = values + (u32)__shfl_sync(0xffffffff, place, lane % 4 * 4 + i) * D;
    const unsigned char* const from = own + value_channel(0, lane / 4);
    constexpr int STEP = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int w = 0; w < WORDS; w += STEP) {
      if (STEP == 4)
        *(uint4*)&to.v[i][w] = __ldcs((const uint4*)(from + 4 * w));
      else if (STEP == 2)
        *(uint2*)&to.v[i][w] = __ldcs((const uint2*)(from + 4 * w));
      else
        to.v[i][w] = __ldcs((const u32*)(from + 4 * w));
    }
    if (PAIR) to.v[i][WORDS] = __ldcs((const unsigned short*)(own + value_channel(2 * WORDS, lane / 4)));
  }
}

constexpr int THREADS = WARPS * 32;
constexpr int SIDES = D <= 64 ? 2 : D <= 128 ? 4 : 8;  // threads that share a token of the window
constexpr int WIDE = SIDES * 32;                       // channels that they have room for
constexpr int ROUNDS = WINDOW * SIDES / THREADS;       // tokens of a thread
constexpr int PAIRS = D / 2, TEAMS = THREADS / PAIRS;  // threads that have two channels, and how often
static_assert(ROUNDS * THREADS == WINDOW * SIDES, "every thread has as many tokens");
static_assert(TEAMS > 0, "there are threads for all channels");

// blocks, list [rows, ..], tokens [rows]: the window's. out [rows, pieces, heads * GROUP, D], lse [rows, pieces, heads *
// GROUP]: the first pieces are the window's, of at most WINDOW tokens, one program each, for a KV head and row.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attend_near(const Number* __restrict__ q, const Number* __restrict__ blocks, const int* __restrict__ list,
                const int* __restrict__ tokens, float* __restrict__ out, float* __restrict__ lse, float scale,
                float softcap, int pieces, i64 q_seq, i64 q_head, i64 block_stride, i64 head_stride,
                i64 value_stride, i64 list_seq) {
  alignas(16) __shared__ float query[GROUP][WIDE];
  alignas(16) __shared__ float weights[WINDOW][8];
  alignas(16) __shared__ Number values[WINDOW][WIDE];
  __shared__ float sums[TEAMS][GROUP][D], totals[GROUP];
  const int head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
  const int me = threadIdx.x, lane = me % 32, warp = me / 32, side = me % SIDES;
  const i64 to = ((i64)row * pieces + blockIdx.x) * heads * GROUP + head * GROUP;
  const int all = tokens[row], own = (all + gridDim.x - 1) / gridDim.x, start = blockIdx.x * own;
  const int count = min(all - start, own);  // none or less: an empty piece

  // keys and values are on their way together: pieces of 8 channels, in turn with the other sides
  uint4 k[ROUNDS][4], v[ROUNDS][4];
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int number = r * (THREADS / SIDES) + me / SIDES, token = start + number;
#pragma unroll
    for (int i = 0; i < 4; ++i) k[r][i] = v[r][i] = make_uint4(0, 0, 0, 0);
    if (number < count) {
      const Number* const from = blocks + head / SHARE * head_stride +
                                 list[row * list_seq + token / BLOCK] * block_stride + token % BLOCK * D +
                                 side * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (D < WIDE && (i * SIDES + side) * 8 >= D) break;
        k[r][i] = *(const uint4*)(from + i * SIDES * 8);
        v[r][i] = *(const uint4*)(from + value_stride + i * SIDES * 8);
      }
    }
  }
  q += row * q_seq + (i64)head * GROUP * q_head;
  for (int i = me; i < GROUP * WIDE; i += THREADS)
    query[i / WIDE][i % WIDE] = i % WIDE < D ? wide(q[i / WIDE * q_head + i % WIDE]) : 0.f;
  __syncthreads();
  float s[ROUNDS][GROUP];
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
    for (int g = 0; g < GROUP; ++g) s[r][g] = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i)  // four channels
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const float4 asked = *(const float4*)&query[g][(i / 2 * SIDES + side) * 8 + i % 2 * 4];
#pragma unroll
      for (int r = 0; r < ROUNDS; ++r)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          s[r][g] =
              fmaf(wide(((const Number*)&k[r][i / 2])[i % 2 * 4 + j]), ((const float*)&asked)[j], s[r][g]);
    }
#pragma unroll
  for (int r = 0; r < ROUNDS; ++r) {
    const int number = r * (THREADS / SIDES) + me / SIDES;
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      for (int i = 1; i < SIDES; i *= 2) s[r][g] += __shfl_xor_sync(0xffffffff, s[r][g], i);
      s[r][g] *= scale * LOG2E;
      if (CAP) s[r][g] = softcap * LOG2E * tanhf(s[r][g] / (softcap * LOG2E));
      if (side == 0) weights[number][g] = number < count ? s[r][g] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) *(uint4*)&values[number][(i * SIDES + side) * 8] = v[r][i];
  }
  __syncthreads();
  for (int g = warp; g < GROUP; g += WARPS) {
    float most = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = lane; i < WINDOW; i += 32) most = fmaxf(most, weights[i][g]);
    for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, i));
    const float shift = most == -INFINITY ? 0.f : most;
#pragma unroll
    for (int i = lane; i < WINDOW; i += 32) sum += weights[i][g] = exp2f(weights[i][g] - shift);
    for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(0xffffffff, sum, i);
    if (lane == 0) totals[g] = sum, lse[to + g] = sum > 0.f ? (most + log2f(sum)) / LOG2E : -INFINITY;
  }
  __syncthreads();
  const int channel = me % PAIRS * 2, team = me / PAIRS;
  float acc[GROUP][2];
#pragma unroll
  for (int g = 0; g < GROUP; ++g) acc[g][0] = acc[g][1] = 0.f;
#pragma unroll 8
  for (int i = THREADS % PAIRS == 0 || team < TEAMS ? team : WINDOW; i < WINDOW; i += TEAMS) {
    const u32 both = *(const u32*)&values[i][channel];
    const float x = wide((Number)both), y = wide((Number)(both >> 16));
    alignas(16) float w[8];
    *(float4*)w = *(const float4*)&weights[i][0];
    if (GROUP > 4) *(float4*)(w + 4) = *(const float4*)&weights[i][4];
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
      acc[g][0] = fmaf(w[g], x, acc[g][0]), acc[g][1] = fmaf(w[g], y, acc[g][1]);
  }
  if (team < TEAMS)
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
      sums[team][g][channel] = acc[g][0], sums[team][g][channel + 1] = acc[g][1];
  __syncthreads();
  for (int i = me; i < GROUP * D; i += THREADS) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < TEAMS; ++j) sum += sums[j][i / D][i % D];
    out[to * D + i] = totals[i / D] > 0.f ? sum / totals[i / D] : 0.f;
  }
}

// The rows of one KV head of a sequence, see `PackedRows`: of `places` places, keys and after them values.
struct Pool {
  const unsigned char* codes;
  const unsigned short* scales;
  const float *middle, *spread;
  int places;

  __device__ __forceinline__ Pool(const unsigned char* codes, const unsigned short* scales,
                                  const float* middle, const float* spread, int places, i64 own)
      : codes(codes + own * 2 * places * D),
        scales(scales + own * 2 * places),
        middle(middle + own * D),
        spread(spread + own * D),
        places(places) {}
};

// A program's part of n tokens of a pool: tiles first to last, of which place_of(i) says where token i lies. q, out, lse and,
// if there is one, again, where lse goes too, are those of the KV head.
template <class PlaceOf>
__device__ __forceinline__ void attend_tiles(const Pool& pool, PlaceOf place_of, int n, int first, int last,
                                             const Number* q, i64 q_head, float scale, float softcap,
                                             float* out, float* lse, float* again) {
  __shared__ float sums[WARPS][GROUP][D];
  __shared__ float tops[WARPS][8], totals[WARPS][8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4,
            places = pool.places;
  const unsigned char* const keys = pool.codes;
  const unsigned char* const values = keys + (i64)places * D;
  const float *const middle = pool.middle, *const spread = pool.spread;
  const unsigned short* const scales = pool.scales;
  const int token = 4 * (g / 2) + g % 2;  // of the first eight rows of keys; two more: of the others

  // the place of a lane's token; past the end it is any that there is
  auto place_in = [&](int tile) { return tile < last ? place_of(tile * TILE + lane % TILE) : 0; };
  Rows next;
  int tile = first + warp, ahead = place_in(tile), here = ahead;
  if (tile < last) {
    load_keys(next, keys, scales, ahead, token, lane);
    if (TWICE) load_values(next, values, scales + places, ahead, token, lane);
  }
  ahead = place_in(tile + WARPS);

  // the query of head g, in which the channels' spread is: 16 channels a part
  u32 query[TURNS][2];
  float factor, shift = 0.f;
  {
    float x[D / 4];
    float most = 0.f;
    const Number* const asked = q + (g < GROUP ? g : 0) * q_head;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int channel = key_channel(i, t);
      const uint2 four = *(const uint2*)(asked + channel);
      const float4 less = *(const float4*)(middle + channel), over = *(const float4*)(spread + channel);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float given = g < GROUP ? wide(((const Number*)&four)[k]) : 0.f;
        shift += given * ((const float*)&less)[k];
        x[4 * i + k] = given * ((const float*)&over)[k];
        most = fmaxf(most, fabsf(x[4 * i + k]));
      }
    }
    for (int i = 1; i < 4; i *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, i));
      shift += __shfl_xor_sync(0xffffffff, shift, i);
    }
    // a power of two, so that nothing is rounded: the largest is between 8 and 16 then
    const int exponent = min(max((int)(__float_as_uint(most) >> 23), 8), 240);
    const float up = __uint_as_float((u32)(127 + 127 + 3 - exponent) << 23);
    factor = __uint_as_float((u32)(exponent - 3) << 23);
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) query[i][j] = halves(x[4 * i + 2 * j] * up, x[4 * i + 2 * j + 1] * up);
  }
  // scores have tokens in rows and heads in columns: of heads 2 t and 2 t + 1
  float times[2], plus[2], top[2] = {-INFINITY, -INFINITY}, total[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    times[i] = __shfl_sync(0xffffffff, factor, (2 * t + i) * 4) * scale * (CAP ? 1.f : LOG2E);
    plus[i] = __shfl_sync(0xffffffff, shift, (2 * t + i) * 4) * scale * (CAP ? 1.f : LOG2E);
  }
  float acc[TURNS][4];
#pragma unroll
  for (int i = 0; i < TURNS; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[i][j] = 0.f;

  for (; tile < last; tile += WARPS) {
    Rows now = next;
    // values come while keys are scored, the next keys while values are added up
    if (!TWICE) load_values(now, values, scales + places, here, token, lane);
    if (TWICE && tile + WARPS < last) {
      load_keys(next, keys, scales, ahead, token, lane);
      load_values(next, values, scales + places, ahead, token, lane);
    }
    float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < TURNS; ++w) {
      const u32 a = now.k[0][w], b = now.k[1][w];
      multiply16(s, numbers(a, LOW), numbers(b, LOW), numbers(a, HIGH), numbers(b, HIGH), query[w][0],
                 query[w][1]);
    }
    const float k_scale[2] = {now.k_scale[0], now.k_scale[1]};
    if (!TWICE && tile + WARPS < last) load_keys(next, keys, scales, ahead, token, lane);
    here = ahead, ahead = place_in(tile + 2 * WARPS);
    bool higher = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = s[i] * k_scale[i / 2] * times[i % 2] + plus[i % 2];
      if (CAP) s[i] = softcap * tanhf(s[i] / softcap) * LOG2E;
      if (tile * TILE + token + i / 2 * 2 >= n) s[i] = -INFINITY;
      higher |= s[i] > top[i % 2] + MOST;
    }
    if (__any_sync(0xffffffff, higher)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = fmaxf(top[i], fmaxf(s[i], s[2 + i]));
        for (int j = 4; j < 32; j *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, j));
        const float shrink = most == -INFINITY ? 1.f : exp2f(top[i] - most);
        top[i] = most;
        total[i] *= shrink;
#pragma unroll
        for (int j = 0; j < TURNS; ++j) acc[j][i] *= shrink, acc[j][2 + i] *= shrink;
      }
    }
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = s[i] == -INFINITY ? 0.f : exp2f(s[i] - top[i % 2]);
      total[i % 2] += w[i];
    }
    const float lift[2] = {now.v_scale[0] * LIFT, now.v_scale[1] * LIFT};
    const u32 b0 = turned(halves(w[0] * lift[0], w[1] * lift[0]));
    const u32 b1 = turned(halves(w[2] * lift[1], w[3] * lift[1]));
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      u32 a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        a[j] = both_numbers(now.v[j / 2 * 2][i / 2], now.v[j / 2 * 2 + 1][i / 2], i % 2 * 2 + j % 2);
      multiply16(acc[i], a[0], a[1], a[2], a[3], b0, b1);
    }
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 4; j < 32; j *= 2) total[i] += __shfl_xor_sync(0xffffffff, total[i], j);
  if (g == 0)
    for (int i = 0; i < 2; ++i) tops[warp][2 * t + i] = top[i], totals[warp][2 * t + i] = total[i];
#pragma unroll
  for (int i = 0; i < TURNS; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int channel = value_channel(i, g) + j / 2;
      if (2 * t + j % 2 < GROUP) sums[warp][2 * t + j % 2][channel] = acc[i][j];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * D; i += THREADS) {
    const int h = i / D, channel = i % D;
    float highest = -INFINITY, all = 0.f, sum = 0.f;
#pragma unroll
    for (int j = 0; j < WARPS; ++j) highest = fmaxf(highest, tops[j][h]);
    if (highest > -INFINITY)
#pragma unroll
      for (int j = 0; j < WARPS; ++j) {
        const float shrink = exp2f(tops[j][h] - highest);
        all += shrink * totals[j][h];
        sum += shrink * sums[j][h][channel];
      }
    out[i] = all > 0.f ? sum / (all * LIFT) : 0.f;
    if (channel == 0) {
      lse[h] = all > 0.f ? (highest + log2f(all)) / LOG2E : -INFINITY;
      if (again) again[h] = lse[h];
    }
  }
}

// codes, scales, middle, spread, listed, count: see `PackedRows`; of the last slot count is 0, and nothing else is read but
// middle and spread. The last pieces of out and lse are those of pools; heard [slots, PIECES, heads * GROUP]: their lse once
// more, for the next step.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    attend_pool(const Number* __restrict__ q, const unsigned char* __restrict__ codes,
                const unsigned short* __restrict__ scales, const float* __restrict__ middle,
                const float* __restrict__ spread, const short* __restrict__ listed,
                const int* __restrict__ count, const int* __restrict__ seq, float* __restrict__ out,
                float* __restrict__ lse, float* __restrict__ heard, float scale, float softcap, int places,
                int pieces, i64 q_seq, i64 q_head) {
  const int splits = gridDim.x, head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
  const i64 to = ((i64)row * pieces + pieces - splits + blockIdx.x) * heads * GROUP + head * GROUP;
  const int slot = seq[row];
  const i64 own = (i64)slot * (heads / SHARE) + head / SHARE;
  const int n = count[own];
  heard += (i64)slot * PIECES * heads * GROUP + head * GROUP;
  if ((int)blockIdx.x == splits - 1)
    for (int i = threadIdx.x; i < (PIECES - splits) * GROUP; i += THREADS)
      heard[(splits + i / GROUP) * heads * GROUP + i % GROUP] = -INFINITY;
  const int tiles = (n + TILE - 1) / TILE, each = (tiles + splits - 1) / splits;
  const int first = blockIdx.x * each, last = min(first + each, tiles);
  listed += own * places;
  attend_tiles(
      Pool(codes, scales, middle, spread, places, own), [&](int i) { return i < n ? (int)listed[i] : 0; }, n,
      first, last, q + row * q_seq + (i64)head * GROUP * q_head, q_head, scale, softcap, out + to * D,
      lse + to, heard + blockIdx.x * heads * GROUP);
}

// Attention over tokens that were chosen though they lie cold in pools: see `Chosen` for ids [rows, heads, n], count [rows,
// heads, splits, 3], tokens and look, `PoolTensors` for place_of [slots, heads, most]. Pieces of out and lse, one of each
// program, come after `before` others.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    look_up(const Number* __restrict__ q, const unsigned char* __restrict__ codes,
            const unsigned short* __restrict__ scales, const float* __restrict__ middle,
            const float* __restrict__ spread, const short* __restrict__ place_of, const int* __restrict__ ids,
            const int* __restrict__ count, const int* __restrict__ tokens, const int* __restrict__ seq,
            float* __restrict__ out, float* __restrict__ lse, float scale, float softcap, int places,
            int pieces, int before, int most, int n, int splits, int look, i64 q_seq, i64 q_head) {
  const int parts = gridDim.x, head = blockIdx.y, heads = gridDim.y, row = blockIdx.z,
            lane = threadIdx.x % 32;
  const i64 to = ((i64)row * pieces + before + blockIdx.x) * heads * GROUP + head * GROUP;
  const i64 line = (i64)row * (heads / SHARE) + head / SHARE;
  // lane i has where the tokens of split i end among all
  const int here = lane < splits ? count[(line * splits + lane) * 3 + 2] : 0;
  int end = here;
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(0xffffffff, end, i);
    if (lane >= i) end += other;
  }
  const int found = __shfl_sync(0xffffffff, end, 31);
  const int tiles = (found + TILE - 1) / TILE, own_tiles = (tiles + parts - 1) / parts;
  const int first = blockIdx.x * own_tiles, last = min(first + own_tiles, tiles);
  if (first >= last) {
    for (int i = threadIdx.x; i < GROUP * D; i += THREADS) out[to * D + i] = 0.f;
    if (threadIdx.x < GROUP) lse[to + threadIdx.x] = -INFINITY;
    return;
  }
  const int all = tokens[row], each = ((all + look - 1) / look + splits - 1) / splits * look;
  const i64 own = (i64)seq[row] * (heads / SHARE) + head / SHARE;
  ids += line * n;
  place_of += own * most;
  // all lanes of a warp ask at once
  auto place = [&](int i) {
    int split = 0;
    for (int j = 0; j < splits; ++j) split += i >= __shfl_sync(0xffffffff, end, j);
    const int number = i - __shfl_sync(0xffffffff, end - here, split & 31);
    return i < found ? place_of[ids[min((split + 1) * each, all) - 1 - number]] & COLD - 1 : 0;
  };
  attend_tiles(Pool(codes, scales, middle, spread, places, own), place, found, first, last,
               q + row * q_seq + (i64)head * GROUP * q_head, q_head, scale, softcap, out + to * D, lse + to,
               (float*)nullptr);
}
