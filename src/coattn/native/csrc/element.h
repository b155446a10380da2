// Element types of the arena and of queries, and their scalar conversions.
#pragma once

#include <bit>
#include <cstdint>

namespace coattn {

// The values are part of the Python interface (coattn.native reads them from the extension).
enum class Elem : int { f32 = 0, bf16 = 1, f16 = 2, int8 = 3, int4 = 4 };
inline constexpr int kElems = 5;

constexpr bool is_quantised(Elem e) {
  return e == Elem::int8 || e == Elem::int4;
}

constexpr const char* elem_name(Elem e) {
  constexpr const char* names[] = {"f32", "bf16", "f16", "int8", "int4"};
  return names[static_cast<int>(e)];
}

// Bytes of n elements; n is even for int4.
constexpr int64_t elem_bytes(Elem e, int64_t n) {
  constexpr int64_t halves[] = {8, 4, 4, 2, 1};  // in half bytes
  return n * halves[static_cast<int>(e)] / 2;
}

static inline float f16_to_f32(uint16_t x) {
  const uint32_t sign = uint32_t{x & 0x8000u} << 16, rest = x & 0x7fffu;
  if (rest >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | (rest << 13));
  // Multiplying by 2^112 moves the exponent from half's bias to float's, subnormals included.
  const float magnitude = std::bit_cast<float>(rest << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

static inline uint16_t f32_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (rest >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds to 65536 or more
  if (rest < 0x38800000u) {
    // Below 2^-14: adding 0.5 puts the subnormal's last bit at the float's last bit, so the FPU rounds for
    // us.
    const float shifted = std::bit_cast<float>(rest) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = rest + 0xfffu + ((rest >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace coattn
