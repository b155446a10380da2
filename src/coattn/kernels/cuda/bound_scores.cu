// The bound that a score has to reach.
//
// Constants: THREADS of a program.

typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int WARPS = THREADS / 32;

// The logarithm of a sum of powers, in parts that are added as they come.
struct Sum {
  float top = -INFINITY, sum = 0.f;

  template <int N>
  __device__ __forceinline__ void add(const float* parts) {
    float high = top;
#pragma unroll
    for (int j = 0; j < N; ++j) high = fmaxf(high, parts[j]);
    const float shift = high == -INFINITY ? 0.f : high;
    sum *= __expf(top - shift);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += __expf(parts[j] - shift);
    top = high;
  }
  // Of all lanes of a warp.
  __device__ __forceinline__ float all() {
    for (int i = 16; i; i /= 2) {
      const float other = __shfl_xor_sync(0xffffffff, top, i), more = __shfl_xor_sync(0xffffffff, sum, i);
      const float high = fmaxf(top, other), shift = high == -INFINITY ? 0.f : high;
      sum = sum * __expf(top - shift) + more * __expf(other - shift);
      top = high;
    }
    return sum > 0.f ? top + __logf(sum) : -INFINITY;
  }
};

// A lane's part of `count` numbers that lie `apart` from each other: the next N of every 32nd from `start` on.
template <int N>
__device__ __forceinline__ void read(float* to, const float* from, int start, int count, i64 apart) {
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = start + 32 * j < count ? from[(start + 32 * j) * apart] : -INFINITY;
}

// bound [rows, q_heads]: the log of the sum of all weights, of parts [rows, n, q_heads] and near [rows, m, q_heads], whose
// rows are near_row apart, and of the row's floor; how far that is above guess [rows, q_heads] goes to above [slots,
// q_heads]. With inside [rows, n, q_heads], which is an estimate of what near lacks: off [rows, q_heads] is added to it, and
// it is noted in told [slots, q_heads]. A warp for each.
extern "C" __global__ void __launch_bounds__(THREADS)
    bound_scores(const float* __restrict__ parts, const float* __restrict__ inside,
                 const float* __restrict__ near, float* __restrict__ bound, const float* __restrict__ floors,
                 const float* __restrict__ guess, float* __restrict__ above, float* __restrict__ told,
                 const float* __restrict__ off, const int* __restrict__ seq, int n, int m, int q_heads,
                 i64 near_row) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  constexpr int MANY = 16, FEW = 2;
  const int head = blockIdx.x * WARPS + threadIdx.x / 32, row = blockIdx.y, lane = threadIdx.x % 32;
  if (head >= q_heads) return;
  const i64 own = (i64)seq[row] * q_heads + head;
  float x[MANY], y[MANY], z[FEW];
  const float* const outer = parts + (i64)row * n * q_heads + head;
  const float* const inner = inside ? inside + (i64)row * n * q_heads + head : nullptr;
  const float* const close = near + row * near_row + head;
  // all of what a lane reads at first is on its way together
  read<MANY>(x, outer, lane, n, q_heads);
  if (inside) read<MANY>(y, inner, lane, n, q_heads);
  read<FEW>(z, close, lane, m, q_heads);
  const float off_by = inside ? off[row * q_heads + head] : 0.f, floor = floors[row],
              guessed = guess[row * q_heads + head];
  Sum all;
  all.add<MANY>(x);
  for (int i = lane + 32 * MANY; i < n; i += 32 * MANY) {
    read<MANY>(x, outer, i, n, q_heads);
    all.add<MANY>(x);
  }
  all.add<FEW>(z);
  for (int i = lane + 32 * FEW; i < m; i += 32 * FEW) {
    read<FEW>(z, close, i, m, q_heads);
    all.add<FEW>(z);
  }
  float found = all.all();
  if (inside) {
    Sum estimate;
    estimate.add<MANY>(y);
    for (int i = lane + 32 * MANY; i < n; i += 32 * MANY) {
      read<MANY>(y, inner, i, n, q_heads);
      estimate.add<MANY>(y);
    }
    const float now = estimate.all(), held = now + off_by;
    const float high = fmaxf(found, held);
    if (high > -INFINITY) found = high + __logf(__expf(found - high) + __expf(held - high));
    if (lane == 0) told[own] = now;
  }
  if (lane == 0) {
    found += floor;
    bound[row * q_heads + head] = found;
    above[own] = found - guessed;
  }
}
