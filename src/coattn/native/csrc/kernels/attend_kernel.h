// What the attend driver and the instruction sets' kernels share. Plain structs only: see isa/elements.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace coattn {

// How __builtin_prefetch asks for memory that is needed some tiles later: into the L2 cache. On x86-64 that is
// prefetcht2. With prefetcht1, 16 threads take 4 to 5% longer over bf16 blocks in DRAM (four and more queries,
// measured in turn on one memory), with prefetchnta more than twice as long. On ARM it is pldl2keep; the hint
// that means prefetcht2 on x86-64 means pldl3keep there, which leaves the line outside of the core.
#if defined(__aarch64__)
inline constexpr int kAheadHint = 2;
#else
inline constexpr int kAheadHint = 1;
#endif

inline constexpr int kTileRows = 64;   // most rows of one tile
inline constexpr int kQueryBatch = 8;  // queries whose scores a kernel keeps at once
inline constexpr int kFoldBytes =
    256;  // working memory of a kernel per channel of a head rounded up to 128 ...
inline constexpr int kFoldExtra = 1 << 15;  // ... and besides

// Up to kTileRows keys and values of one KV head.
struct AttendTile {
  const uint8_t* k = nullptr;
  const uint8_t* v = nullptr;
  int64_t stride = 0;  // bytes between rows
  int n = 0;
  int64_t token0 = 0;  // where the tile's weights start in a weight row
  // int8 blocks only; float16, already advanced to the tile's first row where they are per token.
  const uint16_t* k_scale = nullptr;
  const uint16_t* k_min = nullptr;
  const uint16_t* v_scale = nullptr;
  const uint16_t* v_min = nullptr;
};

// Up to two ranges of memory that a later tile will read.
struct AttendFetch {
  const uint8_t* at = nullptr;
  const uint8_t* end = nullptr;
  const uint8_t* at2 = nullptr;
  const uint8_t* end2 = nullptr;
};

// The queries that share one KV head, and their running softmax. All memory belongs to the worker's scratch.
struct AttendGroup {
  int group = 0;
  int head_size = 0;
  int stride = 0;  // head_size rounded up to 32: floats between rows of q, prep and acc
  float scale = 1;
  float softcap = 0;         // 0: none
  const float* q = nullptr;  // [group][stride], zero past head_size
  // Rows of the following are there for group rounded up to 16, and 64-byte aligned.
  float* prep = nullptr;    // [group][3 times head_size rounded up to 128], the kernel's own form of q
  float* acc = nullptr;     // [group][head_size rounded up to 128], not normalised, in the kernel's own order
  float* v_bias = nullptr;  // [group], sum of weight * v_min
  float* max = nullptr;     // [group]
  float* sum = nullptr;     // [group]
  float* fold = nullptr;    // the kernel's own working memory, kept between tiles
  AttendFetch fetch;        // to be prefetched while the tile is computed
  int steps = 0;            // in how many steps the last tile did that
  float* const* weights = nullptr;  // [group] rows that receive scores (after scale and cap), or null
};

struct AttendKernel {
  const char* name;
  void (*begin)(AttendGroup&);
  // The tile after this one, or null, for kernels that prepare for it; it was fetched before.
  void (*tile)(AttendGroup&, const AttendTile& tile, const AttendTile* next);
  // acc in natural channel order, [group][head_size], not normalised.
  void (*end)(AttendGroup&, float* out);
};

}  // namespace coattn
