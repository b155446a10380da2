// The bound that a score has to reach.
//
// Constants: THREADS of a program.

typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int WARPS = THREADS / 32;

// bound [rows, q_heads]: the log of the sum of all weights, of parts [rows, n, q_heads] and near [rows, m, q_heads],
// and of the row's floor; how far that is above guess [rows, q_heads] goes to above [slots, q_heads]. A warp for each.
extern "C" __global__ void __launch_bounds__(THREADS)
    bound_scores(const float* __restrict__ parts, const float* __restrict__ near, float* __restrict__ bound,
                 const float* __restrict__ floors, const float* __restrict__ guess, float* __restrict__ above,
                 const int* __restrict__ seq, int n, int m, int q_heads) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int head = blockIdx.x * WARPS + threadIdx.x / 32, row = blockIdx.y, lane = threadIdx.x % 32;
  if (head >= q_heads) return;
  float top = -INFINITY, sum = 0.f;
  constexpr int AT_ONCE = 8;
  for (int start = lane; start < n + m; start += 32 * AT_ONCE) {
    float all[AT_ONCE], high = top;
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const int i = start + 32 * j;
      all[j] = i < n       ? parts[((i64)row * n + i) * q_heads + head]
               : i < n + m ? near[((i64)row * m + i - n) * q_heads + head]
                           : -INFINITY;
      high = fmaxf(high, all[j]);
    }
    const float shift = high == -INFINITY ? 0.f : high;
    sum *= __expf(top - shift);
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) sum += __expf(all[j] - shift);
    top = high;
  }
  for (int i = 16; i; i /= 2) {
    const float other = __shfl_xor_sync(0xffffffff, top, i), more = __shfl_xor_sync(0xffffffff, sum, i);
    const float high = fmaxf(top, other), shift = high == -INFINITY ? 0.f : high;
    sum = sum * __expf(top - shift) + more * __expf(other - shift);
    top = high;
  }
  if (lane == 0) {
    const float found = top + __logf(sum) + floors[row];
    bound[row * q_heads + head] = found;
    above[(i64)seq[row] * q_heads + head] = found - guess[row * q_heads + head];
  }
}
