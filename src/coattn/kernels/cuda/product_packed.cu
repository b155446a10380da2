// A linear layer over a few tokens whose weights are codes of 4 bits: out[m][n] = x[m][k] * w[n][k]^T. Reading the
// codes once is all the work there is.
//
// Every thread brings its own operands of the tensor cores into its own places of shared memory (cp.async),
// STAGES - 1 steps ahead, so that no thread waits for another until the sums are added up. The order of k within a
// product is free. A span of a row is SPAN / 2 bytes, of which byte j has the code of column j in its low half and that
// of column SPAN / 2 + j in its high half: thread t of four has the t-th quarter of the bytes of rows g and g + 8, and
// of the tokens the columns of these codes. So one instruction takes two bytes of either row.
//
// A code becomes a number by being the last bits of 128, or of 1024 in float16. A span's product is that of these
// numbers; what they are too large by, and the zero, times the sum of the tokens' numbers, is taken from it, and then it
// is scaled. That sum is a product with ones, whose result lies where it is needed.
//
// A program has TILES * 16 rows of weights at a time; its warps take the spans in turn. At the end of such a pass the
// warps' sums are added, always in the same order. The weights depend on no other kernel: the first stages are on their
// way before the kernel in front has ended.
//
// Constants: WARPS, STAGES, TILES, GROUPS (of eight tokens: room), SHARED_SPANS (that share a scale), SCALES (0: float16, 1: bfloat16, 2: float32), ZEROS (int8, in codes), OFFSET (what is subtracted from codes
// without zeros), BIAS, RESIDUAL, F16 (0: bfloat16).

#include "half.cuh"

typedef unsigned char u8;
typedef long long i64;

constexpr int THREADS = WARPS * 32;
constexpr int SPAN = 128, HALF = SPAN / 2;  // columns, and bytes of their codes
constexpr int SLOT = THREADS * 16;          // bytes between two places of a thread
// of a thread and stage: codes of two rows a tile; of a token 16 columns of low halves, and 16 of high ones
constexpr int CODES = TILES * 2, PLACES = CODES + GROUPS * 4;
constexpr int STAGE = PLACES * SLOT;
constexpr int ROW = TILES * 16 + 4;  // floats between two tokens' sums
constexpr int SUMS = GROUPS * 8 * ROW;
constexpr float MAGIC = F16 ? 1024.f : 128.f;

__device__ __forceinline__ u32 shared_address(const void* x) {
  return (u32)__cvta_generic_to_shared(x);
}
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copies_end() {
  asm volatile("cp.async.commit_group;\n" ::);
}
template <int N>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

__device__ __forceinline__ u32 word(const uint4& of, int i) {
  return i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w;
}
// Two bytes of a word, the first or the last, as numbers of their low halves. high: the other bits of such numbers, in a
// register: as a constant it would take the place of the selector, which would be copied into one each time.
__device__ __forceinline__ u32 number(u32 word, int last, u32 high) {
  return __byte_perm(word & 0x0F0F0F0Fu, high, last ? 0x4342 : 0x4140);
}
// `multiply`, which may change places with others.
__device__ __forceinline__ void add_product(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm(MMA " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// What a span of a row is multiplied with, and what is taken from it for each of the tokens' sum.
struct Terms {
  float scale, less;
};
__device__ __forceinline__ Terms terms(const void* scales, const signed char* zeros, i64 at) {
  Terms found;
  if constexpr (SCALES == 0)
    found.scale = from_half(((const unsigned short*)scales)[at]);
  else if constexpr (SCALES == 1)
    found.scale = __uint_as_float((u32)((const unsigned short*)scales)[at] << 16);
  else
    found.scale = ((const float*)scales)[at];
  found.less = found.scale * (MAGIC + (ZEROS ? (float)zeros[at] : OFFSET));
  return found;
}

// Where a step is: passes over the rows, within them turns over the spans, each in the next stage of the ring.
struct Place {
  int pass = 0, turn = 0, stage = 0;
  __device__ __forceinline__ void next(int turns) {
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    if (++turn == turns) turn = 0, pass++;
  }
};

// code_span: bytes between two spans of a row; rows of a span lie side by side. scale_row: numbers between two scales of
// a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    product_packed(const Number* x, const u8* __restrict__ codes, const void* __restrict__ scales,
                   const signed char* __restrict__ zeros, const Number* __restrict__ bias,
                   const Number* residual, Number* out, int m, int n, int k, int x_row, i64 code_span,
                   i64 scale_row) {
  extern __shared__ __align__(16) unsigned char shared[];
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::);
#endif
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int granules = n / 16;
  const int first = (int)((i64)granules * blockIdx.x / gridDim.x);
  const int mine = (int)((i64)granules * (blockIdx.x + 1) / gridDim.x) - first;
  const int passes = (mine + TILES - 1) / TILES;
  const int spans = k / SPAN, turns = (spans + WARPS - 1) / WARPS;
  const u32 ring = shared_address(shared + threadIdx.x * 16);
  float* const sums = (float*)(shared + STAGES * STAGE);

  auto fetch_codes = [&](const Place& to) {
    const int span = to.turn * WARPS + warp, left = mine - to.pass * TILES;
    if (to.pass >= passes || span >= spans) return;
    const u8* from = codes + span * code_span + ((first + to.pass * TILES) * 16 + g) * HALF + t * 16;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (i < left) {
        copy16(ring + to.stage * STAGE + 2 * i * SLOT, from + 2 * i * 8 * HALF);
        copy16(ring + to.stage * STAGE + (2 * i + 1) * SLOT, from + (2 * i + 1) * 8 * HALF);
      }
  };
  auto fetch_tokens = [&](const Place& to) {
    const int span = to.turn * WARPS + warp;
    if (to.pass >= passes || span >= spans) return;
#pragma unroll
    for (int h = 0; h < GROUPS; ++h)
      if (h * 8 + g < m) {
        const Number* from = x + (i64)(h * 8 + g) * x_row + span * SPAN + t * 16;
        const u32 place = ring + to.stage * STAGE + (CODES + h * 4) * SLOT;
#pragma unroll
        for (int j = 0; j < 4; ++j) copy16(place + j * SLOT, from + j / 2 * HALF + j % 2 * 8);
      }
  };

  Terms following[CODES] = {};  // of the next step, on their way while this one is computed
  auto read_terms = [&](const Place& of) {
    const int span = min(of.turn * WARPS + warp, spans - 1), left = mine - of.pass * TILES;
    const i64 from = span / SHARED_SPANS * scale_row + (first + of.pass * TILES) * 16 + g;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      if (i < left) {
        following[2 * i] = terms(scales, zeros, from + 2 * i * 8);
        following[2 * i + 1] = terms(scales, zeros, from + (2 * i + 1) * 8);
      }
  };

  uint4* const own_places = (uint4*)(shared + threadIdx.x * 16);
  for (int s = 0; s < STAGES; ++s)
    for (int i = CODES; i < PLACES;
         ++i)  // tokens that there are not; what lies in place of rows gives sums that nobody reads
      if ((i - CODES) / 4 * 8 + g >= m) own_places[(s * PLACES + i) * THREADS] = make_uint4(0, 0, 0, 0);
  Place to;
  for (int s = 0; s < STAGES - 1; ++s, to.next(turns)) fetch_codes(to);
  Place at;
  read_terms(at);
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
  to = Place();
  for (int s = 0; s < STAGES - 1; ++s, to.next(turns)) {
    fetch_tokens(to);
    copies_end();
  }

  float sum[TILES][GROUPS][4] = {};
  const u32 one = F16 ? 0x3C003C00u : 0x3F803F80u;
  const u32 high = (F16 ? 0x64646464u : 0x43434343u) | (u32)(m >> 31);  // no constant to the compiler
  while (at.pass < passes) {
    const int span = at.turn * WARPS + warp;
    Terms own[CODES];
#pragma unroll
    for (int i = 0; i < CODES; ++i) own[i] = following[i];
    Place after = at;
    after.next(turns);
    read_terms(after);
    copies_wait<STAGES - 2>();
    fetch_codes(to);  // into the stage that this thread has read in the last step
    fetch_tokens(to);
    copies_end();
    to.next(turns);
    if (span < spans) {
      const uint4* const here = own_places + at.stage * PLACES * THREADS;
      uint4 tokens[GROUPS][4], rows[CODES];
      float total[GROUPS][4] = {}, part[TILES][GROUPS][4] = {};
#pragma unroll
      for (int h = 0; h < GROUPS; ++h)
#pragma unroll
        for (int j = 0; j < 4; ++j) tokens[h][j] = here[(CODES + h * 4 + j) * THREADS];
#pragma unroll
      for (int i = 0; i < CODES; ++i) rows[i] = here[i * THREADS];
      // the sums of all tiles grow in turn: an instruction waits for the one before it of the same sum
#pragma unroll
      for (int step = 0; step < 8; ++step) {
#pragma unroll
        for (int h = 0; h < GROUPS; ++h) {
          const u32 b0 = word(tokens[h][step / 4], step % 4), b1 = word(tokens[h][2 + step / 4], step % 4);
          add_product(total[h], one, one, one, one, b0, b1);
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            const u32 above = word(rows[2 * i], step / 2), below = word(rows[2 * i + 1], step / 2);
            add_product(part[i][h], number(above, step % 2, high), number(below, step % 2, high),
                        number(above >> 4, step % 2, high), number(below >> 4, step % 2, high), b0, b1);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int h = 0; h < GROUPS; ++h)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const Terms& of = own[2 * i + j / 2];
            sum[i][h][j] += of.scale * part[i][h][j] - of.less * total[h][j % 2];
          }
    }
    const int pass = at.pass;
    at.next(turns);
    if (at.pass == pass) continue;

    // the end of a pass: the warps' sums, added in one order
    if (pass > 0) __syncthreads();  // until those of the pass before have been read
    float* const place = sums + warp * SUMS;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int h = 0; h < GROUPS; ++h)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          place[(h * 8 + t * 2 + j % 2) * ROW + i * 16 + g + j / 2 * 8] = sum[i][h][j];
          sum[i][h][j] = 0.f;
        }
    __syncthreads();
    const int base = (first + pass * TILES) * 16, rows = min(TILES, mine - pass * TILES) * 16;
    for (int i = threadIdx.x; i < m * rows; i += THREADS) {
      const int token = i / rows, r = i % rows;
      float y = 0.f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) y += sums[other * SUMS + token * ROW + r];
#if BIAS
      y += wide(bias[base + r]);
#endif
      Number answer = narrow(y);
#if RESIDUAL
      answer = narrow(wide(__ldcg(residual + token * (i64)n + base + r)) + wide(answer));
#endif
      out[token * (i64)n + base + r] = answer;
    }
  }
}
