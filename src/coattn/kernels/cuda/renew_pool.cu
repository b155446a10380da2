// Pools after a step: what came has its places, which places are given away next, and which are attended to.
//
// A program has the ages of a pool in registers: of each a warp has so many places in a row, 32 at a time, so that it reads
// and lists them in order. An age is 15 bits, the steps since a token was wanted, two to a register: so few that other kernels
// find room beside it. Which ages divide those that are listed from the others is found by counting: near where they were in the
// last step first, then by halving, both borders at once.
//
// Constants: THREADS, EACH places of a thread (a multiple of 2), FRESH, COLD.

typedef long long i64;
typedef unsigned int u32;

constexpr int WARPS = THREADS / 32;
constexpr int NEVER = 0x7fffffff;
constexpr u32 NONE = 0x7fff, PINNED = 0x7ffe;  // in place of an age
constexpr int OLDEST = 0x7ffd;

// The sum over all threads of a program. shared: of which calls take turns.
__device__ __forceinline__ u32 total(u32 own, u32 (*shared)[WARPS], int& turn) {
  for (int i = 16; i; i /= 2) own += __shfl_xor_sync(0xffffffff, own, i);
  turn ^= 1;
  if (threadIdx.x % 32 == 0) shared[turn][threadIdx.x / 32] = own;
  __syncthreads();
  u32 all = 0;
  for (int i = 0; i < WARPS; ++i) all += shared[turn][i];
  return all;
}

// The same of all warps before this one, and of all: `own` is the sum of a warp.
__device__ __forceinline__ u32 before(u32 own, u32 (*shared)[WARPS], int& turn, u32& all) {
  turn ^= 1;
  if (threadIdx.x % 32 == 0) shared[turn][threadIdx.x / 32] = own;
  __syncthreads();
  u32 sum = 0;
  all = 0;
  for (int i = 0; i < WARPS; ++i) {
    if (i < (int)threadIdx.x / 32) sum += shared[turn][i];
    all += shared[turn][i];
  }
  return sum;
}

// See `PoolTensors` and `PackedRows` for all but these: row, of place_of, and listed_row, of listed, are numbers a KV head;
// nobody is the slot of padding rows; hot places at most are listed beside the pins. Without `listed` nothing is.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    renew_pool(int* __restrict__ token_of, int* __restrict__ age, int* __restrict__ next,
               int* __restrict__ coming, int* __restrict__ clock, int* __restrict__ ends,
               short* __restrict__ place_of, short* __restrict__ listed, int* __restrict__ count,
               int* __restrict__ since, int* __restrict__ given, const int* __restrict__ seq, int row,
               int listed_row, int places, int nobody, int pins, int hot) {
  __shared__ u32 shared[2][WARPS];
  const int me = threadIdx.x, lane = me % 32, heads = gridDim.x, slot = seq[blockIdx.y];
  if (slot >= nobody) return;
  const i64 own = (i64)slot * heads + blockIdx.x;
  token_of += own * places;
  age += own * places;
  next += own * FRESH;
  coming += own * FRESH;
  place_of += own * row;
  const int now = clock[own];
  const int before_this = listed ? min(now - since[own], OLDEST) : 0;
  constexpr int MOST = (FRESH + THREADS - 1) / THREADS;
  int token[MOST], at[MOST], gone[MOST];
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const int f = me + i * THREADS;
    token[i] = f < FRESH ? coming[f] : -1;
    at[i] = f < FRESH ? next[f] : -1;
  }
#pragma unroll
  for (int i = 0; i < MOST; ++i) gone[i] = token[i] >= 0 ? token_of[at[i]] : -1;
#pragma unroll
  for (int i = 0; i < MOST; ++i) {
    const int f = me + i * THREADS;
    if (gone[i] >= 0) place_of[gone[i]] = -1;
    if (token[i] >= 0) {
      place_of[token[i]] = (short)at[i];
      token_of[at[i]] = token[i];
      age[at[i]] = now;
      coming[f] = -1;
    }
    if (f < FRESH) next[f] = -1;
  }
  __syncthreads();

  // pins, and places that hold nothing, are never given away
  u32 ages[EACH / 2], none = 0;
  int turn = 0;
  const int start = me / 32 * 32 * EACH + lane;
  auto age_of = [&](int place) {
    const int when = place < places ? age[place] : NEVER;
    return when == NEVER ? NONE : place < pins ? PINNED : (u32)min(now - when, OLDEST);
  };
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const u32 then = age_of(start + 32 * i);
    ages[i / 2] = i % 2 ? ages[i / 2] | then << 16 : then;
    none += then >= PINNED;
  }
  none = total(none, shared, turn);
  // how many ages, and what stands in place of one, are at least so large: the sum sets the upper bit of each half
  auto large = [&](u32 least) {
    const u32 more = (0x8000 - least) * 0x10001;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < EACH / 2; ++i) found += (ages[i] + more) >> 15 & 0x10001;
    return (found + (found >> 16)) & 0xffff;
  };
  // old: from which on there are FRESH, or 1; young: up to which there are no more than `hot`, or 0. Tokens get younger
  // alone, so both steps lie no earlier than in the last step, and not much later
  int old = 1, oldest = min(now - given[own], OLDEST), young = 0, widest = before_this;
  for (int reach = 1; old < oldest || young < widest; reach = min(4 * reach, 1 << 15)) {
    const int middle = max((old + oldest + 1) / 2, oldest + 1 - reach);
    const int upper = max((young + widest + 1) / 2, widest + 1 - reach);
    const u32 found = total(large(middle) | large(upper + 1) << 16, shared, turn);
    if (old < oldest) {
      const bool enough = (found & 0xffff) >= FRESH + none;
      old = enough ? middle : old;
      oldest = enough ? oldest : middle - 1;
    }
    if (young < widest) {
      const bool fits = EACH * THREADS - (int)(found >> 16) <= hot;
      young = fits ? upper : young;
      widest = fits ? widest : upper - 1;
    }
  }

  auto older = [&](u32 then) { return then > (u32)old && then < PINNED; };
  auto attended = [&](u32 then) { return then <= (u32)young || then == PINNED; };
  u32 lists = 0, mine = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const u32 then = ages[i / 2] >> 16 * (i % 2) & 0xffff;
    lists += (u32)older(then) + ((u32)(then == (u32)old) << 16);
    mine += attended(then);
  }
  for (int i = 16; i; i /= 2) {
    lists += __shfl_xor_sync(0xffffffff, lists, i);
    mine += __shfl_xor_sync(0xffffffff, mine, i);
  }
  u32 all;
  const u32 first = before(lists, shared, turn, all);
  // those older than that all, then of that age the first
  int to = first & 0xffff, after = (all & 0xffff) + (first >> 16), put = (int)before(mine, shared, turn, all);
  const u32 below = (1u << lane) - 1;
  if (listed) listed += own * listed_row;
  // read once more: held until here, they would take all registers
#pragma unroll 8
  for (int i = 0; i < EACH; ++i) {
    const int place = start + 32 * i;
    const u32 then = age_of(place);
    const u32 one = __ballot_sync(0xffffffff, older(then));
    const u32 two = __ballot_sync(0xffffffff, then == (u32)old);
    const int number = older(then)        ? to + __popc(one & below)
                       : then == (u32)old ? after + __popc(two & below)
                                          : FRESH;
    if (number < FRESH) next[number] = place;
    to += __popc(one), after += __popc(two);
    if (listed) {
      const u32 three = __ballot_sync(0xffffffff, attended(then));
      if (attended(then))
        listed[put + __popc(three & below)] = (short)place;
      else if (then <= (u32)before_this)
        place_of[token_of[place]] = (short)(place + COLD);
      put += __popc(three);
    }
  }
  if (me == 0) {
    clock[own] = now + 1, ends[own] = 0, given[own] = now - old;
    if (listed) count[own] = all, since[own] = now - young;
  }
}
