// A linear layer over a few tokens: out[m][n] = x[m][k] * w[n][k]^T. Reading the weights once is all the work
// there is.
//
// Every thread brings its own operands of the tensor cores into its own places of shared memory (cp.async, 16
// bytes at a time), STAGES - 1 steps ahead, so that no thread waits for another until the sums are added up.
// The order of k within a product is free: a thread's 16 bytes are columns 8t..8t+7 of a row, which serve as
// the operands of two instructions, and the tokens' numbers are taken in the same order.
//
// A program has TILES * 8 rows of weights at a time; its warps take the columns in turn, 32 each, so together
// they read long pieces of each row. At the end of such a pass the warps' sums are added, always in the same
// order. The weights depend on no other kernel: the first stages are on their way before the kernel in front
// has ended.
//
// Constants: WARPS, STAGES, TILES, TOKENS (8 or 16: room for tokens), BIAS, RESIDUAL, F16 (0: bfloat16).

#include "half.cuh"

typedef unsigned long long u64;
typedef long long i64;

constexpr int THREADS = WARPS * 32;
constexpr int HALVES = TOKENS / 8;     // loads of x per thread and step
constexpr int SLOTS = TILES + HALVES;  // places per thread and stage
constexpr u32 SLOT = THREADS * 16;     // bytes between two places of a thread: no bank twice
constexpr u32 STAGE = SLOTS * SLOT;
constexpr int ROW = TILES * 8 + (TILES % 2 ? 0 : 8);  // floats between two tokens' sums: no bank twice
constexpr int SUMS = TOKENS * ROW;                    // floats of a warp

__device__ __forceinline__ void fetch_once(u32 to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "l"(policy));
}
__device__ __forceinline__ void fetch(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit() {
  asm volatile("cp.async.commit_group;\n" ::);
}
__device__ __forceinline__ uint4 take(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at));
  return v;
}
__device__ __forceinline__ void clear(u32 at) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};\n" ::"r"(at), "r"(0));
}

// Where a step is: passes over the rows, within them turns over the columns, each in the next stage of the
// ring.
struct Place {
  int pass = 0, turn = 0, stage = 0;
  __device__ __forceinline__ void next(int turns) {
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    if (++turn == turns) turn = 0, pass++;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    product(const Number* __restrict__ x, const Number* __restrict__ w, const Number* __restrict__ bias,
            const Number* __restrict__ residual, Number* __restrict__ out, int m, int n, int k, int x_row) {
  extern __shared__ __align__(16) unsigned char shared[];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::);
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int granules = n / 8;
  const int first = (int)((i64)granules * blockIdx.x / gridDim.x);
  const int mine = (int)((i64)granules * (blockIdx.x + 1) / gridDim.x) - first;
  const int passes = (mine + TILES - 1) / TILES;
  const int chunks = k / 32, turns = (chunks + WARPS - 1) / WARPS;
  const u32 ring = (u32)__cvta_generic_to_shared(shared) + threadIdx.x * 16;
  float* const sums = (float*)(shared + STAGES * STAGE);
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));

  auto fetch_weights = [&](const Place& to) {
    const int chunk = to.turn * WARPS + warp, left = mine - to.pass * TILES;
    if (to.pass >= passes || chunk >= chunks) return;
    const Number* from = w + (i64)((first + to.pass * TILES) * 8 + g) * k + chunk * 32 + t * 8;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (i < left) fetch_once(ring + to.stage * STAGE + i * SLOT, from + (i64)i * 8 * k, policy);
  };
  auto fetch_tokens = [&](const Place& to) {
    const int chunk = to.turn * WARPS + warp;
    if (to.pass >= passes || chunk >= chunks) return;
#pragma unroll
    for (int h = 0; h < HALVES; ++h)
      if (h * 8 + g < m)
        fetch(ring + to.stage * STAGE + (TILES + h) * SLOT,
              x + (i64)(h * 8 + g) * x_row + chunk * 32 + t * 8);
  };

  for (int s = 0; s < STAGES; ++s)
    for (int h = 0; h < HALVES; ++h)
      if (h * 8 + g >= m) clear(ring + s * STAGE + (TILES + h) * SLOT);  // tokens that there are not
  Place to;
  for (int s = 0; s < STAGES - 1; ++s, to.next(turns)) fetch_weights(to);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
  to = Place();
  for (int s = 0; s < STAGES - 1; ++s, to.next(turns)) {
    fetch_tokens(to);
    commit();
  }

  float sum[TILES][4] = {};
  Place at;
  while (at.pass < passes) {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(STAGES - 2) : "memory");
    fetch_weights(to);  // into the stage that this thread has read in the last step
    fetch_tokens(to);
    commit();
    to.next(turns);
    if (at.turn * WARPS + warp < chunks) {
      const u32 here = ring + at.stage * STAGE;
      const uint4 low = take(here + TILES * SLOT);
      const uint4 high = HALVES > 1 ? take(here + (TILES + 1) * SLOT) : make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        const uint4 v = take(here + i * SLOT);
        multiply(sum[i], low.x, high.x, low.y, high.y, v.x, v.y);
        multiply(sum[i], low.z, high.z, low.w, high.w, v.z, v.w);
      }
    }
    const int pass = at.pass;
    at.next(turns);
    if (at.pass == pass) continue;

    // the end of a pass: the warps' sums, added in one order
    if (pass > 0) __syncthreads();  // until those of the pass before have been read
    float* const own = sums + warp * SUMS;
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      float* const place = own + g * ROW + i * 8 + t * 2;
      *(float2*)place = make_float2(sum[i][0], sum[i][1]);
      if (HALVES > 1) *(float2*)(place + 8 * ROW) = make_float2(sum[i][2], sum[i][3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] = 0.f;
    }
    __syncthreads();
    const int rows = min(TILES, mine - pass * TILES) * 8;
    for (int i = threadIdx.x; i < m * rows; i += THREADS) {
      const int token = i / rows, row = i % rows;
      const i64 column = (first + pass * TILES) * 8 + row;
      float y = 0.f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) y += sums[other * SUMS + token * ROW + row];
#if BIAS
      y += wide(bias[column]);
#endif
      Number answer = narrow(y);
#if RESIDUAL
      answer = narrow(wide(__ldcg(residual + token * (i64)n + column)) + wide(answer));
#endif
      out[token * (i64)n + column] = answer;
    }
  }
}
