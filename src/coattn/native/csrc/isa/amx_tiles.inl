// What both AMX kernels need: tile configuration, transposes, padded rows.
//
// Scores are computed transposed, [token][query]: keys then enter the tile unit as they lie in memory, and
// the softmax (isa/amx_softmax.inl) runs over queries side by side, without a horizontal step.
namespace coattn::amx {
namespace {

using namespace avx512;  // vf and its functions, compiled anew in this translation unit

constexpr int kStep = 32;  // tokens at a time
// Queries at a time: the other half of a tile's 16 rows or columns has their low parts.
constexpr int kLanes = 8;

constexpr int kRows = 16;                      // of a whole tile
constexpr int kRowBytes = 64;                  // of each of them
constexpr int kTileBytes = kRows * kRowBytes;  // of a whole tile

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// GCC's tile loads do not tell the compiler that they read memory. This does: stores before it happen before
// it.
inline void publish() {
  __asm__ volatile("" ::: "memory");
}

inline void configure(const TileConfig& config) {
  publish();
  _tile_loadconfig(&config);
}

// The tile unit falls asleep after some 150 ns without work and takes 250-300 ns to wake (measured on Emerald
// Rapids: 39 ns for the four multiplications of a step right after others, 300 ns after 200 ns of vector
// code). So the integer kernel multiplies something nobody needs where tiles have a pause (the bf16 kernel's
// pauses are too short to need it). Tile 2 holds nothing that lives across vector code.
inline void stay_awake() {
  _tile_dpbuud(2, 6, 7);
}

// In place: x[i] lane j <-> x[j] lane i.
inline void transpose(__m512i* x) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // x[4 a + r] holds, in 128-bit lane l, rows 4 a .. 4 a + 3 of column 4 l + r.
  for (int r = 0; r < 4; ++r) {
    const __m512i ab_low = _mm512_shuffle_i32x4(x[r], x[4 + r], 0x44),
                  ab_high = _mm512_shuffle_i32x4(x[r], x[4 + r], 0xee);
    const __m512i cd_low = _mm512_shuffle_i32x4(x[8 + r], x[12 + r], 0x44);
    const __m512i cd_high = _mm512_shuffle_i32x4(x[8 + r], x[12 + r], 0xee);
    y[r] = _mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
    y[4 + r] = _mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
    y[8 + r] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
    y[12 + r] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// kStep rows of `to_stride` bytes, zero where the source has no row or no byte.
inline void pad_rows(const uint8_t* from, int64_t from_stride, int n, int row_bytes, uint8_t* to,
                     int to_stride) {
  for (int t = 0; t < n; ++t) copy_tail(to + t * to_stride, from + t * from_stride, row_bytes, to_stride);
  for (int t = n; t < kStep; ++t) std::memset(to + t * to_stride, 0, static_cast<size_t>(to_stride));
}

// Bits of a where the mask has ones, else of b.
inline __m512i choose(int mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi32(mask), a, b, 0xca);
}

}  // namespace
}  // namespace coattn::amx
