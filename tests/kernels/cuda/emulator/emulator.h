// CUDA C++ kernels on a CPU: every thread is a fiber, and those of a block take turns.
//
// A fiber runs until it waits for others: at a barrier, or where the lanes of a warp exchange something. What is
// asynchronous on a GPU happens as late as it may: copies arrive when they are waited for.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

typedef unsigned short Number;
typedef unsigned int u32;
typedef unsigned long long u64;

struct uint3 {
  unsigned x, y, z;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

struct Barrier {
  int size = 0, count = 0;
  long turn = 0;
};
struct Copy {
  char* to;
  const char* from;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  uint3 thread;
  bool done = false;
  std::vector<std::vector<Copy>> groups{1};
};
struct Warp {
  Barrier barrier;
  u64 sent[32][8];
};

inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier whole;
inline Fiber* current;
inline std::function<void()> kernel_call;
inline uint3 blockIdx, gridDim, blockDim;
#define threadIdx (current->thread)

inline void yield() {
  swapcontext(&current->context, &scheduler);
}
inline void release(Barrier& b) {
  if (b.size && b.count >= b.size) b.count = 0, ++b.turn;
}
inline void wait(Barrier& b) {
  const long turn = b.turn;
  ++b.count;
  release(b);
  while (b.turn == turn) yield();
}
inline void body() {
  kernel_call();
  current->done = true;
  --whole.size;
  release(whole);
  Warp& own = warps[current->thread.x / 32];
  --own.barrier.size;
  release(own.barrier);
  yield();
}
inline void run_block(int threads) {
  fibers = std::vector<Fiber>(threads);
  warps = std::vector<Warp>((threads + 31) / 32);
  whole = Barrier{threads};
  for (auto& w : warps) w.barrier.size = 32;
  constexpr size_t STACK = 128 << 10;
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.thread = {(unsigned)i, 0, 0};
    f.stack = std::make_unique<char[]>(STACK);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, body, 0);
  }
  for (int left = threads; left;) {
    left = 0;
    for (auto& f : fibers)
      if (!f.done) {
        current = &f;
        swapcontext(&scheduler, &f.context);
        left += !f.done;
      }
  }
}
inline void run_grid(unsigned x, unsigned y, unsigned z, int threads) {
  gridDim = {x, y, z}, blockDim = {(unsigned)threads, 1, 1};
  for (blockIdx.z = 0; blockIdx.z < z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x) run_block(threads);
}

inline int lane_of() {
  return current->thread.x % 32;
}
inline Warp& warp_of() {
  return warps[current->thread.x / 32];
}
inline void __syncthreads() {
  wait(whole);
}
inline void __syncwarp() {
  wait(warp_of().barrier);
}
// What every lane sends, as long as `read` looks at it.
template <class Send, class Read>
auto exchange(Send send, Read read) {
  Warp& own = warp_of();
  send(own.sent[lane_of()]);
  wait(own.barrier);
  auto found = read(own.sent);
  wait(own.barrier);
  return found;
}
template <class T>
T from_lane(T x, int lane) {
  return exchange([&](u64* to) { std::memcpy(to, &x, sizeof x); },
                  [&](u64(*all)[8]) {
                    T y;
                    std::memcpy(&y, all[lane], sizeof y);
                    return y;
                  });
}
template <class T>
T __shfl_sync(u32, T x, int lane) {
  return from_lane(x, lane & 31);
}
template <class T>
T __shfl_xor_sync(u32, T x, int mask) {
  return from_lane(x, lane_of() ^ mask);
}
template <class T>
T __shfl_up_sync(u32, T x, int by) {
  return from_lane(x, lane_of() >= by ? lane_of() - by : lane_of());
}
inline u32 __ballot_sync(u32, bool vote) {
  return exchange([&](u64* to) { to[0] = vote; },
                  [&](u64(*all)[8]) {
                    u32 found = 0;
                    for (int i = 0; i < 32; ++i) found |= (u32)all[i][0] << i;
                    return found;
                  });
}
inline bool __any_sync(u32 mask, bool vote) {
  return __ballot_sync(mask, vote) != 0;
}

template <class A, class B>
auto min(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B>
auto max(A a, B b) {
  return a < b ? b : a;
}
template <class T>
T __ldg(const T* x) {
  return *x;
}
template <class T>
T __ldcg(const T* x) {
  return *x;
}
template <class T>
T __ldcs(const T* x) {
  return *x;
}
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
  const u64 both = (u64)y << 32 | x;
  u32 found = 0;
  for (int i = 0; i < 4; ++i) found |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return found;
}
inline int __popc(u32 x) {
  return __builtin_popcount(x);
}
inline int __ffs(u32 x) {
  return __builtin_ffs((int)x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
template <class To, class From>
To bits(From x) {
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(u32 x) {
  return bits<float>(x);
}
inline u32 __float_as_uint(float x) {
  return bits<u32>(x);
}
inline float __int_as_float(int x) {
  return bits<float>(x);
}
inline int __float_as_int(float x) {
  return bits<int>(x);
}
inline int atomicMax(int* to, int x) {
  const int old = *to;
  *to = std::max(old, x);
  return old;
}

// Numbers of 16 bits.
inline float from_half(unsigned short x) {
  const int sign = x >> 15, exponent = x >> 10 & 31, digits = x & 1023;
  const float found = exponent == 31 ? (digits ? NAN : INFINITY)
                      : exponent     ? std::ldexp(1024.f + digits, exponent - 25)
                                     : std::ldexp((float)digits, -24);
  return sign ? -found : found;
}
inline unsigned short to_half(float x) {
  const unsigned short sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (std::isnan(x)) return sign | 0x7e00;
  if (x == 0.f) return sign;
  if (x >= 65520.f) return sign | 0x7c00;
  int exponent;
  std::frexp(x, &exponent);  // x < 2^exponent
  const int unit = std::max(exponent - 11, -24);
  const float digits = std::nearbyint(std::ldexp(x, -unit));  // at most 2048
  if (unit == -24) return sign | (unsigned short)digits;
  return sign | (unsigned short)(((unit + 25) << 10) + (int)digits - 1024);
}
inline u32 halves(float first, float second) {
  return to_half(first) | (u32)to_half(second) << 16;
}
#if F16
inline float wide(Number x) {
  return from_half(x);
}
inline Number narrow(float x) {
  return to_half(x);
}
#else
inline float wide(Number x) {
  return bits<float>((u32)x << 16);
}
inline Number narrow(float x) {
  const u32 own = bits<u32>(x);
  return (Number)((own + 0x7fff + (own >> 16 & 1)) >> 16);
}
#endif
inline u32 pair(float first, float second) {
  return narrow(first) | (u32)narrow(second) << 16;
}
inline uint4 stream(const void* at) {
  uint4 x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

// Products of a warp. Fragments as PTX has them.
template <class Left, class Right, class T>
void product(T* d, const T* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, int each, Left left,
             Right right) {
  const int g = lane_of() / 4, t = lane_of() % 4;
  exchange(
      [&](u64* to) {
        const u32 own[6] = {a0, a1, a2, a3, b0, b1};
        for (int i = 0; i < 6; ++i) to[i] = own[i];
      },
      [&](u64(*all)[8]) {
        for (int i = 0; i < 4; ++i) {
          const int row = g, column = 2 * t + i % 2, lower = i / 2;
          T sum = c[i];
          for (int half = 0; half < 2; ++half)
            for (int k = 0; k < 4 * each; ++k) {
              const u32 a = (u32)all[row * 4 + k / each][2 * half + lower];
              const u32 b = (u32)all[column * 4 + k / each][4 + half];
              sum += left(a, k % each) * right(b, k % each);
            }
          d[i] = sum;
        }
        return 0;
      });
}
inline void multiply_bytes(u32* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, u32 c0, u32 c1, u32 c2,
                           u32 c3) {
  const u32 c[4] = {c0, c1, c2, c3};
  product(
      d, c, a0, a1, a2, a3, b0, b1, 4, [](u32 x, int i) { return x >> 8 * i & 255; },
      [](u32 x, int i) { return (u32)(int)(signed char)(x >> 8 * i); });
}
inline void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const float own[4] = {c[0], c[1], c[2], c[3]};
  auto number = [](u32 x, int i) { return wide((Number)(x >> 16 * i)); };
  product(c, own, a0, a1, a2, a3, b0, b1, 2, number, number);
}
inline void add_product(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply(c, a0, a1, a2, a3, b0, b1);
}
inline void multiply16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const float own[4] = {c[0], c[1], c[2], c[3]};
  auto number = [](u32 x, int i) { return from_half((unsigned short)(x >> 16 * i)); };
  product(c, own, a0, a1, a2, a3, b0, b1, 2, number, number);
}
inline float power(float x) {
  return std::exp2(x);
}
inline u32 higher(u32 x, u32 y) {
  return halves(std::fmax(from_half((unsigned short)x), from_half((unsigned short)y)),
                std::fmax(from_half(x >> 16), from_half(y >> 16)));
}
// Bytes of a word of codes, less 128, as two float16.
inline u32 numbers(u32 word, u32 which) {
  const int first = which == 0x5140 ? 0 : 2;
  return halves((float)(word >> 8 * first & 255) - 128, (float)(word >> 8 * (first + 1) & 255) - 128);
}
inline u32 both_numbers(u32 x, u32 y, int which) {
  return halves((float)(x >> 8 * which & 255) - 128, (float)(y >> 8 * which & 255) - 128);
}
// 8 x 8 numbers of 16 bits, of which lane i has 2 (i % 4) and the next of row i / 4, turned.
inline u32 turned(u32 x) {
  const int row = lane_of() / 4, column = lane_of() % 4 * 2;
  return exchange([&](u64* to) { to[0] = x; },
                  [&](u64(*all)[8]) {
                    auto at = [&](int r, int c) {
                      return (u32)(all[r * 4 + c / 2][0] >> 16 * (c % 2)) & 0xffff;
                    };
                    return at(column, row) | at(column + 1, row) << 16;
                  });
}

// Copies that run beside the kernel.
inline char anchor;
inline u32 shared_address(const void* x) {
  return (u32)((const char*)x - &anchor);
}
inline void copy16(u32 to, const void* from) {
  current->groups.back().push_back({&anchor + (int)to, (const char*)from});
}
inline void copies_end() {
  current->groups.emplace_back();
}
template <int N>
void copies_wait() {
  auto& groups = current->groups;
  while (groups.size() > N + 1) {
    for (auto& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
    groups.erase(groups.begin());
  }
}
