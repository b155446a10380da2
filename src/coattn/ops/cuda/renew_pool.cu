// Pools after a step: what came has its places, which places are given away next, and which are attended to.
//
// A program has a pool's ages in its threads' registers, each the ages of neighbours; so what it lists is in order. Which
// age divides those that are listed from the others is found by halving: all count, and both borders are looked for at once.
//
// Constants: THREADS, EACH places of a thread (a multiple of 4), FRESH, COLD.

typedef long long i64;
typedef unsigned int u32;

constexpr int WARPS = THREADS / 32;
constexpr int NEVER = 0x7fffffff;

// The sum over all threads of a program. shared: `[2][WARPS]`, of which calls take turns.
__device__ __forceinline__ u32 total(u32 own, u32 (*shared)[WARPS], int& turn) {
  for (int i = 16; i; i /= 2) own += __shfl_xor_sync(0xffffffff, own, i);
  turn ^= 1;
  if (threadIdx.x % 32 == 0) shared[turn][threadIdx.x / 32] = own;
  __syncthreads();
  u32 all = 0;
  for (int i = 0; i < WARPS; ++i) all += shared[turn][i];
  return all;
}

// The same of all threads before this one.
__device__ __forceinline__ u32 before(u32 own, u32 (*shared)[WARPS], int& turn) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 sum = own;
  for (int i = 1; i < 32; i *= 2) {
    const u32 other = __shfl_up_sync(0xffffffff, sum, i);
    if (lane >= i) sum += other;
  }
  turn ^= 1;
  if (lane == 31) shared[turn][warp] = sum;
  __syncthreads();
  sum -= own;
  for (int i = 0; i < warp; ++i) sum += shared[turn][i];
  return sum;
}

// See `TokenPool` and `PackedRows` for all but these: row, of place_of, and listed_row, of listed, are numbers a KV head;
// nobody is the slot of padding rows; hot places at most are listed beside the pins. Without `listed` nothing is.
extern "C" __global__ void __launch_bounds__(THREADS)
    renew_pool(int* __restrict__ token_of, int* __restrict__ age, int* __restrict__ next,
               int* __restrict__ coming, int* __restrict__ clock, int* __restrict__ ends,
               short* __restrict__ place_of, short* __restrict__ listed, int* __restrict__ count,
               int* __restrict__ since, const int* __restrict__ seq, int row, int listed_row, int places,
               int nobody, int pins, int hot) {
  __shared__ u32 shared[2][WARPS];
  const int me = threadIdx.x, heads = gridDim.x, slot = seq[blockIdx.y];
  if (slot >= nobody) return;
  const i64 own = (i64)slot * heads + blockIdx.x;
  token_of += own * places;
  age += own * places;
  next += own * FRESH;
  coming += own * FRESH;
  place_of += own * row;
  const int now = clock[own];
  for (int f = me; f < FRESH; f += THREADS) {
    const int token = coming[f], at = next[f];
    if (token >= 0) {
      const int gone = token_of[at];
      if (gone >= 0) place_of[gone] = -1;
      place_of[token] = (short)at;
      token_of[at] = token;
      age[at] = now;
      coming[f] = -1;
    }
    next[f] = -1;
  }
  __syncthreads();

  // pins, and places that hold nothing, are never given away
  int ages[EACH], least = NEVER, turn = 0;
  const int start = me * EACH;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    ages[i] = start + i < places && start + i >= pins ? age[start + i] : NEVER;
    least = min(least, ages[i]);
  }
  for (int i = 16; i; i /= 2) least = min(least, __shfl_xor_sync(0xffffffff, least, i));
  if (me % 32 == 0) shared[turn][me / 32] = (u32)least;
  __syncthreads();
  for (int i = 0; i < WARPS; ++i) least = min(least, (int)shared[turn][i]);

  // old: the age up to which FRESH places are, or the one before this step; young: the age from which `hot` are
  int low = least - 1, old = now - 1, young = listed ? since[own] : now, high = now;
  const int first = young;
  while (low < old || young < high) {
    const int middle = low + (old - low) / 2, upper = young + (high - young) / 2;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      found += (u32)(ages[i] <= middle) + ((u32)(ages[i] >= upper && ages[i] != NEVER) << 16);
    found = total(found, shared, turn);
    if (low < old) {
      const bool enough = (found & 0xffff) >= FRESH;
      old = enough ? middle : old;
      low = enough ? low : middle + 1;
    }
    if (young < high) {
      const bool fits = (int)(found >> 16) <= hot;
      high = fits ? upper : high;
      young = fits ? young : upper + 1;
    }
  }

  auto attended = [&](int i) {
    const int place = start + i;
    if (place < pins) return place < places && age[place] != NEVER;
    return ages[i] >= young && ages[i] != NEVER;
  };
  // those before that age all, then of that age the first
  u32 own_count = 0, own_listed = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    own_count += (u32)(ages[i] < old) + ((u32)(ages[i] == old) << 16);
    own_listed += attended(i);
  }
  const u32 all = total(own_count, shared, turn), ahead = before(own_count, shared, turn);
  int older = ahead & 0xffff, same = (all & 0xffff) + (ahead >> 16);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int to = ages[i] < old ? older++ : ages[i] == old ? same++ : FRESH;
    if (to < FRESH) next[to] = start + i;
  }
  if (listed) {
    listed += own * listed_row;
    int to = (int)before(own_listed, shared, turn);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (attended(i))
        listed[to++] = (short)(start + i);
      else if (start + i >= pins && ages[i] >= first && ages[i] < young)
        place_of[token_of[start + i]] = (short)(start + i + COLD);
    }
    if (me == THREADS - 1) count[own] = to, since[own] = young;
  }
  if (me == 0) clock[own] = now + 1, ends[own] = 0;
}
