// The fewest entries in DRAM of each query head that bring the mass to a share, found without sorting.
//
// Scores lie in bins of 1/64 below the head's largest one, 2,048 of them; what is 32 below it weighs nothing.
// A bin's count and the sum of its weights are integers (the weights as what they lack to the bin's upper
// edge), so that they do not depend on the order of the additions, and the result is the same in every run. A
// head keeps whole bins, the heaviest first, until it has its share: entries that weigh up to 1/64 less than
// the last one needed come too. Where the cap cuts a bin, its first entries are kept.
//
//   largest     the largest score of each head, where the scores' own kernel did not leave it
//   histogram   scores -> bins, by chunks of the sequence
//   threshold   bins -> the last bin that is kept, lse; leaves the bins at zero
//   edge        entries of a bin that the cap cuts, by chunk
//   count       which entries each head keeps; how many any head of a group does, by chunk
//   choose      positions and weights of those, in order
//   settle      where heads attend to what any head of their group keeps: weights over the sum of all of them
//   send        the same to host memory, as many as there are
//
// Constants: GROUP query heads a KV head.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

constexpr int BINS = 2048, PER_UNIT = 64, THREADS = 512, ALL = 0x7fffffff;
constexpr float FINE = 2097152.0f;  // 2^21

struct Place {
  int bin;
  float rest;  // of the bin's width
};

__device__ __forceinline__ Place place(float top, float score) {
  const float x = fminf((top - score) * PER_UNIT, BINS - 0.5f);
  const int bin = static_cast<int>(x);
  return {bin, x - bin};
}

__device__ __forceinline__ float from_ordered(u32 u) {
  return __uint_as_float(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}

// Sum over the threads before this one, and over all.
__device__ __forceinline__ int2 scan(int x, int* room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = x;
  for (int by = 1; by < 32; by *= 2) {
    const int y = __shfl_up_sync(0xffffffffu, sum, by);
    if (lane >= by) sum += y;
  }
  __syncthreads();  // the room may still be read
  if (lane == 31) room[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) {
    before += i < warp ? room[i] : 0;
    all += room[i];
  }
  return {before + sum - x, all};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    largest(const float* scores, const int* tokens, u32* top, int q_heads, i64 n, int chunk) {
  const int seq = blockIdx.z, first = blockIdx.x * chunk, last = min(first + chunk, tokens[seq]);
  const i64 row = i64{seq} * q_heads + blockIdx.y;
  float x = -INFINITY;
  for (int i = first + threadIdx.x; i < last; i += THREADS) x = fmaxf(x, scores[row * n + i]);
  for (int by = 16; by; by /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, by));
  const u32 u = __float_as_uint(x);
  if (threadIdx.x % 32 == 0 && x > -INFINITY) atomicMax(top + row, u & 0x80000000u ? ~u : u | 0x80000000u);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    histogram(const float* scores, const int* tokens, const u32* top, u32* count, u64* lack, int q_heads,
              i64 n, int chunk) {
  __shared__ u32 held[BINS], less[BINS];
  const int seq = blockIdx.z, first = blockIdx.x * chunk, last = min(first + chunk, tokens[seq]);
  if (first >= last) return;
  const i64 row = i64{seq} * q_heads + blockIdx.y;
  for (int i = threadIdx.x; i < BINS; i += THREADS) held[i] = less[i] = 0;
  __syncthreads();
  const float most = from_ordered(top[row]);
  const float* from = scores + row * n;
  for (int i = first + 4 * threadIdx.x; i < last; i += 4 * THREADS) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    const float s[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j >= last) break;
      const Place p = place(most, s[j]);
      atomicAdd(held + p.bin, 1u);
      atomicAdd(less + p.bin, static_cast<u32>((1.0f - __expf(-p.rest / PER_UNIT)) * FINE));
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    if (!held[i]) continue;
    atomicAdd(count + row * BINS + i, held[i]);
    atomicAdd(lack + row * BINS + i, static_cast<u64>(less[i]));
  }
}

// 256 threads for each query head, 8 bins each.
extern "C" __global__ void threshold(u32* count, u64* lack, u32* top, const int* tokens, const float* gpu_lse,
                                     int pieces, float tau, int cap, int tail, int together, int q_heads,
                                     float* most, int* bin, int* limit, float* lse, float* others) {
  __shared__ float room[8];
  __shared__ int counts[8], enough, over;
  __shared__ float before_bin, of_bin;
  __shared__ int count_before, count_of;
  const int seq = blockIdx.y, head = blockIdx.x, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const i64 row = i64{seq} * q_heads + head;
  float known = -INFINITY;
  for (int i = 0; i < pieces; ++i) {
    const float x = gpu_lse[(i64{seq} * pieces + i) * q_heads + head], high = fmaxf(x, known);
    if (high > -INFINITY) known = high + logf(expf(x - high) + expf(known - high));
  }
  if (tokens[seq] == 0) {
    if (tid == 0) most[row] = 0, bin[row] = -1, limit[row] = ALL, lse[row] = others[row] = -INFINITY;
    return;
  }
  const float high = from_ordered(top[row]);
  if (tid == 0) enough = over = BINS, before_bin = of_bin = 0, count_before = count_of = 0;
  float mass[8], sum = 0;
  int held[8], entries = 0;
  for (int j = 0; j < 8; ++j) {
    const i64 at = row * BINS + tid * 8 + j;
    held[j] = static_cast<int>(count[at]);
    mass[j] = held[j] ? (held[j] - static_cast<float>(lack[at]) / FINE) *
                            expf(-static_cast<float>(tid * 8 + j) / PER_UNIT)
                      : 0;
    count[at] = 0, lack[at] = 0;
    sum += mass[j], entries += held[j];
  }
  float up = sum;
  int up_count = entries;
  for (int by = 1; by < 32; by *= 2) {
    const float y = __shfl_up_sync(0xffffffffu, up, by);
    const int c = __shfl_up_sync(0xffffffffu, up_count, by);
    if (lane >= by) up += y, up_count += c;
  }
  if (lane == 31) room[warp] = up, counts[warp] = up_count;
  __syncthreads();
  float before = 0, total = 0;
  int count_here = up_count - entries;
  for (int i = 0; i < 8; ++i) {
    if (i < warp) before += room[i], count_here += counts[i];
    total += room[i];
  }
  before += up - sum;
  const float known_mass = expf(known - high), need = tau * (total + known_mass) - known_mass;
  const bool none = !(need > 0) && tau < 1;
  {
    float mass_to = before;
    int count_to = count_here;
    for (int j = 0; j < 8; ++j) {
      mass_to += mass[j], count_to += held[j];
      if (tau < 1 && mass_to >= need) atomicMin(&enough, tid * 8 + j);
      if (count_to > cap) atomicMin(&over, tid * 8 + j);
    }
  }
  __syncthreads();
  const int last = min(min(enough, over), BINS - 1);
  float mass_to = before;
  int count_to = count_here;
  for (int j = 0; j < 8; ++j) {
    if (tid * 8 + j == last)
      before_bin = mass_to, of_bin = mass[j], count_before = count_to, count_of = held[j];
    mass_to += mass[j], count_to += held[j];
  }
  __syncthreads();
  if (tid == 0) {
    const bool cut = !none && over == last && over < BINS;
    const int taken = cut ? cap - count_before : ALL;
    const float part = cut ? of_bin * taken / max(count_of, 1) : of_bin;
    const float kept = none ? 0 : before_bin + part;
    const float own = kept > 0 ? high + logf(kept) : -INFINITY, whole = high + logf(total);
    most[row] = high;
    bin[row] = none ? -1 : last;
    limit[row] = taken;
    lse[row] = tail ? own : whole;
    // together, what is kept is not known yet: `settle` makes of everything what is left
    others[row] = tail == 1      ? -INFINITY
                  : together     ? whole
                  : kept < total ? high + logf(total - kept)
                                 : -INFINITY;
    top[row] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    edge(const float* scores, const int* tokens, const float* most, const int* bin, const int* limit,
         int* edges, int q_heads, i64 n, int chunks, int chunk) {
  __shared__ int room[THREADS / 32];
  const int seq = blockIdx.z, first = blockIdx.x * chunk, last = min(first + chunk, tokens[seq]);
  const i64 row = i64{seq} * q_heads + blockIdx.y;
  if (first >= last || limit[row] == ALL) return;
  int found = 0;
  for (int i = first + threadIdx.x; i < last; i += THREADS)
    found += place(most[row], scores[row * n + i]).bin == bin[row];
  const int all = scan(found, room).y;
  if (threadIdx.x == 0) edges[row * chunks + blockIdx.x] = all;
}

struct Heads {
  float most[GROUP];
  int bin[GROUP], limit[GROUP], before[GROUP];
};

// What each head knows before its chunk.
__device__ __forceinline__ void prepare(Heads& h, const float* most, const int* bin, const int* limit,
                                        const int* edges, i64 row, int chunks, int* room) {
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    h.most[g] = most[row + g], h.bin[g] = bin[row + g], h.limit[g] = limit[row + g], h.before[g] = 0;
    if (h.limit[g] == ALL) continue;
    int sum = 0;
    for (int i = threadIdx.x; i < static_cast<int>(blockIdx.x); i += THREADS)
      sum += edges[(row + g) * chunks + i];
    h.before[g] = scan(sum, room).y;
  }
}

// Which of 4 entries of a thread each head keeps, as 4 bits a head.
__device__ __forceinline__ u32 mark(Heads& h, const float* scores, i64 row, i64 n, int at, int last,
                                    int* room) {
  u32 flags = 0;
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    u32 edge = 0;
    if (at < last) {
      const float4 four = *reinterpret_cast<const float4*>(scores + (row + g) * n + at);
      const float s[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int b = place(h.most[g], s[j]).bin;
        const bool here = at + j < last;
        flags |= static_cast<u32>(here && b < h.bin[g]) << (4 * g + j);
        edge |= static_cast<u32>(here && b == h.bin[g]) << j;
      }
    }
    if (h.limit[g] != ALL) {
      const int2 found = scan(__popc(edge), room);
      int rank = h.before[g] + found.x;
      h.before[g] += found.y;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(edge >> j & 1)) continue;
        if (rank >= h.limit[g]) edge &= ~(1u << j);
        ++rank;
      }
    }
    flags |= edge << (4 * g);
  }
  return flags;
}

__device__ __forceinline__ u32 any(u32 flags) {
  u32 found = 0;
#pragma unroll
  for (int g = 0; g < GROUP; ++g) found |= flags >> (4 * g) & 15;
  return found;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    count(const float* scores, const int* tokens, const float* most, const int* bin, const int* limit,
          const int* edges, int* kept, u32* flags, int kv_heads, i64 n, int chunks, int chunk) {
  __shared__ int room[THREADS / 32];
  const int seq = blockIdx.z, first = blockIdx.x * chunk, last = min(first + chunk, tokens[seq]);
  if (first >= last) return;
  const i64 list = i64{seq} * kv_heads + blockIdx.y, row = list * GROUP;
  Heads h;
  prepare(h, most, bin, limit, edges, row, chunks, room);
  int found = 0;
  for (int i = first; i < last; i += 4 * THREADS) {
    const int at = i + 4 * static_cast<int>(threadIdx.x);
    const u32 mine = mark(h, scores, row, n, at, last, room);
    if (at < last) flags[list * (n / 4) + at / 4] = mine;
    found += __popc(any(mine));
  }
  const int all = scan(found, room).y;
  if (threadIdx.x == 0) kept[list * chunks + blockIdx.x] = all;
}

// Sum over the threads, in every one of them; always in the same order.
__device__ __forceinline__ float add_up(float x, float* room) {
  for (int by = 16; by; by /= 2) x += __shfl_xor_sync(0xffffffffu, x, by);
  __syncthreads();  // the room may still be read
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  float all = 0;
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) all += room[i];
  return all;
}

// Weights are over exp(norm). together: each head has all that is listed, and leaves the sum of its chunk.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose(const float* scores, const int* tokens, const u32* flags, const int* kept, const float* norms,
           int* index, float* weights, int* total, int kv_heads, i64 n, int chunks, int chunk, int room_for,
           int together, float* sums) {
  __shared__ int room[THREADS / 32];
  const int seq = blockIdx.z, first = blockIdx.x * chunk, last = min(first + chunk, tokens[seq]);
  const i64 list = i64{seq} * kv_heads + blockIdx.y, row = list * GROUP;
  if (first >= last) {
    if (blockIdx.x == 0 && threadIdx.x == 0) total[list] = 0;
    return;
  }
  int sum = 0;
  for (int i = threadIdx.x; i < static_cast<int>(blockIdx.x); i += THREADS) sum += kept[list * chunks + i];
  int place_in = scan(sum, room).y;
  float own_sum[GROUP] = {};
  for (int i = first; i < last; i += 4 * THREADS) {
    const int at = i + 4 * static_cast<int>(threadIdx.x);
    const u32 mine = at < last ? flags[list * (n / 4) + at / 4] : 0, found = any(mine);
    const int2 where = scan(__popc(found), room);
    const int to = place_in + where.x;
    place_in += where.y;
    if (!found) continue;
#pragma unroll
    for (int j = 0, k = to; j < 4; ++j) {
      if (!(found >> j & 1)) continue;
      if (k < room_for) index[list * room_for + k] = at + j;
      ++k;
    }
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const u32 own = together ? found : mine >> (4 * g) & 15;
      float4 four = {0, 0, 0, 0};
      if (own) four = *reinterpret_cast<const float4*>(scores + (row + g) * n + at);
      const float s[4] = {four.x, four.y, four.z, four.w}, norm = norms[row + g];
#pragma unroll
      for (int j = 0, k = to; j < 4; ++j) {
        if (!(found >> j & 1)) continue;
        const float weight = own >> j & 1 ? __expf(s[j] - norm) : 0.0f;
        if (k < room_for) weights[(row + g) * room_for + k] = weight, own_sum[g] += weight;
        ++k;
      }
    }
  }
  if (together) {
    __shared__ float part[THREADS / 32];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const float all = add_up(own_sum[g], part);
      if (threadIdx.x == 0) sums[(row + g) * chunks + blockIdx.x] = all;
    }
  }
  if (last == tokens[seq] && threadIdx.x == 0) total[list] = min(place_in, room_for);
}

extern "C" __global__ void settle(const float* sums, const float* norms, const int* tokens, const int* total,
                                  float* weights, float* lse, float* others, int tail, int kv_heads,
                                  int chunks, int chunk, int room_for) {
  __shared__ float room[32];
  const int used = (tokens[blockIdx.z] + chunk - 1) / chunk;
  const i64 list = i64{blockIdx.z} * kv_heads + blockIdx.y;
  const int many = total[list];
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    const i64 row = list * GROUP + g;
    float sum = 0;
    for (int i = threadIdx.x; i < used; i += blockDim.x) sum += sums[row * chunks + i];
    sum = add_up(sum, room);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      if (tail) lse[row] = sum > 0 ? norms[row] + logf(sum) : -INFINITY;
      if (tail != 1) {
        const float left = tokens[blockIdx.z] ? expf(others[row] - norms[row]) - sum : 0;
        others[row] = left > 0 ? norms[row] + logf(left) : -INFINITY;
      }
    }
    if (!tail || !(sum > 0)) continue;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < many; i += gridDim.x * blockDim.x)
      weights[row * room_for + i] /= sum;
  }
}

extern "C" __global__ void send(const uint4* index, const uint4* weights, const int* total, uint4* index_to,
                                uint4* weights_to, int* total_to, int kv_heads, int room_for) {
  const i64 list = i64{blockIdx.z} * kv_heads + blockIdx.y;
  const int many = total[list], quads = (many + 3) / 4, width = room_for / 4;
  if (blockIdx.x == 0 && threadIdx.x == 0) total_to[list] = many;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < quads; i += gridDim.x * blockDim.x) {
    index_to[list * width + i] = index[list * width + i];
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
      weights_to[(list * GROUP + g) * width + i] = weights[(list * GROUP + g) * width + i];
  }
}
