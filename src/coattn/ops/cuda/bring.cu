// Rows of single tokens out of DRAM into their places in a pool, by bulk copies: those have a way of their own to
// memory, where loads that take microseconds would hold up those of other programs on the same multiprocessor.
//
// Constants: ROW bytes of a key or a value (a multiple of 16), BLOCK tokens a block, FRESH, MOVES, STAGES pieces on their
// way.

typedef long long i64;
typedef unsigned int u32;

constexpr int ROWS = 16;  // of a piece: a lane for each

__device__ __forceinline__ u32 address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_in(u32 to, const char* from, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "n"(ROW), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void copy_out(char* to, u32 from) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "n"(ROW)
               : "memory");
}
__device__ __forceinline__ bool arrived(u32 bar, u32 phase) {
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(done)
               : "r"(bar), "r"(phase)
               : "memory");
  return done;
}

// memory [blocks, heads, 2, BLOCK, ROW], gpu likewise; strides in bytes. coming, next: tokens and places, of lines
// (sequences and their heads) by slot, with MOVES by row; of each line from `began` (MOVES: 0) up to `ends`. A warp a
// program; the pieces of all lines are numbered, and every program takes every so manieth.
extern "C" __global__ void __launch_bounds__(32)
    bring(const char* __restrict__ memory, const int* __restrict__ table, const int* __restrict__ seq,
          char* __restrict__ gpu, const int* __restrict__ next, const int* __restrict__ coming,
          const int* __restrict__ began, const int* __restrict__ ends, int heads, int lines, int places,
          int nobody, int first_block, i64 block_stride, i64 head_stride, i64 table_seq, i64 gpu_block,
          i64 gpu_head) {
  extern __shared__ int until[];  // of each line: pieces up to its end
  __shared__ __align__(128) char ring[STAGES][ROWS][2][ROW];
  __shared__ __align__(8) unsigned long long bars[STAGES];
  const int lane = threadIdx.x;
  if (lane < STAGES) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(&bars[lane])) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  auto begin_of = [&](int slot, int head) { return MOVES ? 0 : began[slot * heads + head]; };
  int total = 0;
  for (int first = 0; first < lines; first += 32) {
    const int line = first + lane, slot = line < lines ? seq[line / heads] : nobody;
    int pieces = 0;
    if (slot < nobody) {
      const int end = ends[MOVES ? line : slot * heads + line % heads];
      pieces = max((end + ROWS - 1) / ROWS - begin_of(slot, line % heads) / ROWS, 0);
    }
    for (int i = 1; i < 32; i *= 2) {
      const int other = __shfl_up_sync(0xffffffff, pieces, i);
      if (lane >= i) pieces += other;
    }
    if (line < lines) until[line] = total + pieces;
    total += __shfl_sync(0xffffffff, pieces, 31);
  }
  __syncwarp();
  char* home[STAGES];  // where a lane's row goes; none: it has no row
#pragma unroll
  for (int i = 0; i < STAGES; ++i) home[i] = nullptr;
  auto begin = [&](int stage, char*& to, int piece) {
    to = nullptr;
    if (piece >= total) return;
    int low = 0, high = lines - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (until[middle] > piece)
        high = middle;
      else
        low = middle + 1;
    }
    const int row = low / heads, head = low % heads, slot = seq[row], start = begin_of(slot, head);
    const int at = (piece - (low ? until[low - 1] : 0) + start / ROWS) * ROWS + lane;
    const i64 own = MOVES ? low : (i64)slot * heads + head;
    const char* from = nullptr;
    if (lane < ROWS && at >= start) {
      const int token = coming[own * FRESH + at], place = next[own * FRESH + at];
      if (token >= 0) {
        from = memory + table[row * table_seq + token / BLOCK] * block_stride + head * head_stride +
               token % BLOCK * ROW;
        to = gpu + (first_block + (i64)slot * (places / BLOCK) + place / BLOCK) * gpu_block +
             head * gpu_head + place % BLOCK * ROW;
      }
    }
    const int rows = __popc(__ballot_sync(0xffffffff, from != nullptr));
    const u32 bar = address(&bars[stage]);
    // what was here has been read: a lane's rows are its own
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    if (lane == 0) expect(bar, rows * 2 * ROW);
    __syncwarp();
    if (from)
      for (int i = 0; i < 2; ++i) copy_in(address(ring[stage][lane % ROWS][i]), from + i * BLOCK * ROW, bar);
  };
  const int step = gridDim.x;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) begin(i, home[i], blockIdx.x + i * step);
  u32 phase = 0;
  for (int first = blockIdx.x; first < total; first += STAGES * step, phase ^= 1) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      const int piece = first + i * step;
      if (piece >= total) break;
      constexpr int LAST = STAGES - 1;
      begin((i + LAST) % STAGES, home[(i + LAST) % STAGES], piece + LAST * step);
      while (!arrived(address(&bars[i]), phase)) {
      }
      if (home[i])
        for (int k = 0; k < 2; ++k) copy_out(home[i] + k * BLOCK * ROW, address(ring[i][lane % ROWS][k]));
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
