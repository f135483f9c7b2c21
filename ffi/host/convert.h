// Scalar conversions between float32 and the storage types, exact to the last bit and free of tables and branches where
// it matters, so that a compiler vectorises loops over them. Never included by sources that are compiled for one
// ISA: the linker keeps one copy of an inline function, and it could be theirs.
#ifndef XLA_GPU_HOST_CONVERT_H_
#define XLA_GPU_HOST_CONVERT_H_

#include <cstdint>
#include <cstring>

#include "ffi/base/dtype.h"

namespace xla_gpu {

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FloatOf(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float BFloat16ToFloat(uint16_t bits) { return FloatOf(static_cast<uint32_t>(bits) << 16); }

inline uint16_t FloatToBFloat16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded);
}

inline float Float16ToFloat(uint16_t half) {
  const uint32_t magnitude = half & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = normal + (112u << 23);  // infinities and NaN
  const uint32_t subnormal = BitsOf(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t bits = magnitude < 0x0400 ? subnormal : magnitude < 0x7c00 ? normal : special;
  return FloatOf(bits | static_cast<uint32_t>(half & 0x8000) << 16);
}

// Rounds |value| to `mantissa_bits` bits, halves to even, with the exponent re-biased by `bias` and subnormals below
// 2^(1 - bias). What exceeds the target's largest number is left to the caller.
template <int kMantissaBits, int kBias>
inline uint32_t RoundMagnitude(uint32_t magnitude) {
  constexpr int kShift = 23 - kMantissaBits;
  const uint32_t odd = (magnitude >> kShift) & 1;
  const uint32_t normal =
      (magnitude + (1u << (kShift - 1)) - 1 + odd - (static_cast<uint32_t>(127 - kBias) << 23)) >> kShift;
  // Adding a number whose last bit is the target's smallest subnormal lets the adder do the rounding.
  constexpr uint32_t kMagic = static_cast<uint32_t>(127 - kBias + 1 + kShift) << 23;
  const uint32_t subnormal = BitsOf(FloatOf(magnitude) + FloatOf(kMagic)) - kMagic;
  return magnitude < (static_cast<uint32_t>(127 - kBias + 1) << 23) ? subnormal : normal;
}

inline uint16_t FloatToFloat16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rounded = RoundMagnitude<10, 15>(magnitude);
  const uint32_t result = magnitude > 0x7f800000 ? 0x7e00 : magnitude >= 0x477ff000 ? 0x7c00 : rounded;
  return static_cast<uint16_t>(result | ((bits >> 16) & 0x8000));
}

// Saturate at the largest finite number, 448; NaN stays NaN.
inline uint8_t FloatToFloat8E4M3FN(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rounded = RoundMagnitude<3, 7>(magnitude);
  const uint32_t result = magnitude > 0x7f800000 ? 0x7f : magnitude >= BitsOf(448.0f) ? 0x7e : rounded;
  return static_cast<uint8_t>(result | ((bits >> 24) & 0x80));
}

inline float Float8E4M3FNToFloat(uint8_t stored) {
  const uint32_t magnitude = stored & 0x7f;
  const uint32_t subnormal = BitsOf(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t bits = magnitude == 0x7f ? 0x7fc00000u : magnitude < 8 ? subnormal : normal;
  return FloatOf(bits | static_cast<uint32_t>(stored & 0x80) << 24);
}

// Saturate at the largest finite number, 57344; NaN stays NaN.
inline uint8_t FloatToFloat8E5M2(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t rounded = RoundMagnitude<2, 15>(magnitude);
  const uint32_t result = magnitude > 0x7f800000 ? 0x7e : magnitude >= BitsOf(57344.0f) ? 0x7b : rounded;
  return static_cast<uint8_t>(result | ((bits >> 24) & 0x80));
}

// One type per DType for kernels that are templates over elements: the stored form, and its way to and from float32.
struct Float32 {
  using Stored = float;
  static float Load(Stored stored) { return stored; }
  static Stored Store(float value) { return value; }
};
struct Float16 {
  using Stored = uint16_t;
  static float Load(Stored stored) { return Float16ToFloat(stored); }
  static Stored Store(float value) { return FloatToFloat16(value); }
};
struct BFloat16 {
  using Stored = uint16_t;
  static float Load(Stored stored) { return BFloat16ToFloat(stored); }
  static Stored Store(float value) { return FloatToBFloat16(value); }
};

// Calls `body` with the type above that stands for `dtype`, which is computed in.
template <class Body>
auto WithElement(DType dtype, Body&& body) {
  return WithComputeType<Float32, Float16, BFloat16>(dtype, static_cast<Body&&>(body));
}

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_CONVERT_H_
