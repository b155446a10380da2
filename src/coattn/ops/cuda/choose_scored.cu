// Which tokens are wanted, by scores of 16 bits; and the bound that a score has to reach.
//
// A token whose score is below the bound of every query head of its group is left out: what all such tokens weigh is
// added up, with the bound as the number that powers count from, since none is above it.
//
// Constants: THREADS of a program, GROUP query heads a KV head (1 to 8).

typedef unsigned int u32;
typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int PAD = (GROUP + 1) / 2 * 2;
constexpr int WARPS = THREADS / 32;
constexpr int EACH = 2;  // tokens of a thread at a time
constexpr int LOOK = THREADS * EACH;
constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float wide(u32 x) {
  float y;
  asm("{.reg .b16 h, z; mov.b32 {h, z}, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
  return y;
}

struct Looked {
  u32 words[PAD / 2];
  int held;
};

// scores [rows, heads, n, PAD] float16, to which offset [rows, heads, 8] is to be added where there is one; ids [rows, heads, n]: wanted tokens, from the first of each split's; count
// [rows, heads, splits]; tail [rows, splits, heads * GROUP].
extern "C" __global__ void __launch_bounds__(THREADS)
    choose_scored(const u32* __restrict__ scores, const float* __restrict__ offset,
                  const float* __restrict__ bound, const int* __restrict__ tokens,
                  const int* __restrict__ seq, const short* __restrict__ place_of, int* __restrict__ age,
                  const int* __restrict__ clock, int* __restrict__ ids, int* __restrict__ count,
                  float* __restrict__ tail, float touch, int n, int most, int places) {
  __shared__ int sums[2][EACH][WARPS];
  __shared__ float weights[WARPS][GROUP];
  const int split = blockIdx.x, splits = gridDim.x, head = blockIdx.y, heads = gridDim.y, row = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int there = tokens[row], each = ((there + LOOK - 1) / LOOK + splits - 1) / splits * LOOK;
  const int first = split * each, last = min(first + each, there);
  const i64 line = (i64)row * heads + head, pool = (i64)seq[row] * heads + head;
  const int now = clock[pool];
  const short* const where = place_of + pool * most;
  int* const mine = ids + line * n + first;
  float least[GROUP], sum[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; ++g)
    least[g] = bound[line * GROUP + g] - (offset ? offset[line * 8 + g] : 0.f), sum[g] = 0.f;
  auto read = [&](int token) {
    Looked x;
    x.held = 0;
#pragma unroll
    for (int i = 0; i < PAD / 2; ++i) x.words[i] = 0xfc00fc00u;
    if (token < last) {
      x.held = where[token];
#pragma unroll
      for (int i = 0; i < PAD / 2; ++i) x.words[i] = __ldg(scores + (line * n + token) * (PAD / 2) + i);
    }
    return x;
  };
  Looked next[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) next[i] = read(first + i * THREADS + threadIdx.x);
  int found = 0, side = 0;
  for (int at = first; at < last; at += LOOK, side ^= 1) {
    u32 votes[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const Looked x = next[i];
      next[i] = read(at + LOOK + i * THREADS + threadIdx.x);
      float above[GROUP], margin = -INFINITY;
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
        above[g] = wide(x.words[g / 2] >> 16 * (g % 2)) - least[g];
        margin = fmaxf(margin, above[g]);
      }
      const bool real = at + i * THREADS + threadIdx.x < last, outside = x.held < 0;
      if (real && !outside && margin >= -touch) age[pool * places + x.held] = now;
      const bool wanted = real && outside && margin >= 0.f;
      votes[i] = __ballot_sync(0xffffffff, wanted);
      if (real && outside && !wanted)
#pragma unroll
        for (int g = 0; g < GROUP; ++g) sum[g] += power(above[g] * LOG2E);
      if (lane == 0) sums[side][i][warp] = __popc(votes[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int before = found;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const int there_too = sums[side][i][w];
        if (w < warp) before += there_too;
        found += there_too;
      }
      if (votes[i] >> lane & 1)
        mine[before + __popc(votes[i] & ((1u << lane) - 1))] = at + i * THREADS + threadIdx.x;
    }
  }
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    for (int i = 16; i; i /= 2) sum[g] += __shfl_xor_sync(0xffffffff, sum[g], i);
    if (lane == 0) weights[warp][g] = sum[g];
  }
  __syncthreads();
  if (threadIdx.x < GROUP) {
    float all = 0.f;
    for (int w = 0; w < WARPS; ++w) all += weights[w][threadIdx.x];
    const float floor = bound[line * GROUP + threadIdx.x];
    tail[((i64)row * splits + split) * heads * GROUP + head * GROUP + threadIdx.x] =
        all > 0.f ? floor + __logf(all) : -INFINITY;
  }
  if (threadIdx.x == 0) count[line * splits + split] = found;
}

// bound [rows, q_heads]: the log of the sum of all weights, of parts [rows, n, q_heads] and near [rows, m, q_heads],
// and of the row's floor. A warp for each.
extern "C" __global__ void __launch_bounds__(THREADS)
    bound_scores(const float* __restrict__ parts, const float* __restrict__ near, float* __restrict__ bound,
                 const float* __restrict__ floors, int n, int m, int q_heads) {
  const int head = blockIdx.x * WARPS + threadIdx.x / 32, row = blockIdx.y, lane = threadIdx.x % 32;
  if (head >= q_heads) return;
  float top = -INFINITY, sum = 0.f;
  for (int i = lane; i < n + m; i += 32) {
    const float x =
        i < n ? parts[((i64)row * n + i) * q_heads + head] : near[((i64)row * m + i - n) * q_heads + head];
    const float high = fmaxf(top, x), shift = high == -INFINITY ? 0.f : high;
    sum = sum * __expf(top - shift) + __expf(x - shift);
    top = high;
  }
  for (int i = 16; i; i /= 2) {
    const float other = __shfl_xor_sync(0xffffffff, top, i), more = __shfl_xor_sync(0xffffffff, sum, i);
    const float high = fmaxf(top, other), shift = high == -INFINITY ? 0.f : high;
    sum = sum * __expf(top - shift) + more * __expf(other - shift);
    top = high;
  }
  if (lane == 0) bound[row * q_heads + head] = top + __logf(sum) + floors[row];
}
