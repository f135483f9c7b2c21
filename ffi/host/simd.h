// Vectors of the widest kind that the including source is compiled for, as GCC and Clang know them, and the arithmetic
// on them that kernels need. A kernel's source is compiled once per ISA; each time XLA_GPU_SIMD_NAMESPACE names a
// namespace of its own.
//
// NOTE: such a source must neither define nor call inline functions outside that namespace, those of the C++ library
// included: the linker keeps one copy of an inline function, and if it kept the AVX-512 one, baseline code would run
// it.
#ifndef XLA_GPU_HOST_SIMD_H_
#define XLA_GPU_HOST_SIMD_H_

#ifndef XLA_GPU_SIMD_NAMESPACE
#error "define XLA_GPU_SIMD_NAMESPACE before including simd.h"
#endif

#include <stdint.h>
#include <string.h>

#include <utility>  // for std::integer_sequence, a type

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define XLA_GPU_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define XLA_GPU_UNROLL _Pragma("clang loop unroll(full)")
#else
#define XLA_GPU_UNROLL _Pragma("GCC unroll 16")
#endif

namespace xla_gpu {
namespace XLA_GPU_SIMD_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float VecF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecU __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecU16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t VecU8 __attribute__((vector_size(kLanes)));

constexpr float kInfinity = __builtin_inff();

// ---- Moving --------------------------------------------------------------------------------------------------------

template <class Vector>
XLA_GPU_INLINE Vector LoadAs(const void* from) {
  Vector vector;
  memcpy(&vector, from, sizeof(vector));
  return vector;
}

XLA_GPU_INLINE VecF LoadF(const float* from) { return LoadAs<VecF>(from); }
XLA_GPU_INLINE void StoreF(float* to, VecF vector) { memcpy(to, &vector, sizeof(vector)); }
XLA_GPU_INLINE VecF Broadcast(float value) { return value - VecF{}; }
XLA_GPU_INLINE VecF BitsToF(VecU bits) { return reinterpret_cast<VecF>(bits); }
XLA_GPU_INLINE VecU BitsOf(VecF vector) { return reinterpret_cast<VecU>(vector); }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define XLA_GPU_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef XLA_GPU_SHUFFLE
#define XLA_GPU_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, VecI{__VA_ARGS__})
#endif

using Lanes = std::make_integer_sequence<int, kLanes>;

template <int... kLane>
XLA_GPU_INLINE VecI LaneIndex(std::integer_sequence<int, kLane...>) {
  return VecI{kLane...};
}

// a0 b0 a1 b1 …, of the lower and of the upper half of the lanes.
template <int... kLane>
XLA_GPU_INLINE VecF InterleaveLow(VecF a, VecF b, std::integer_sequence<int, kLane...>) {
  return XLA_GPU_SHUFFLE(a, b, (kLane / 2 + kLane % 2 * kLanes)...);
}
template <int... kLane>
XLA_GPU_INLINE VecF InterleaveHigh(VecF a, VecF b, std::integer_sequence<int, kLane...>) {
  return XLA_GPU_SHUFFLE(a, b, (kLanes / 2 + kLane / 2 + kLane % 2 * kLanes)...);
}

// Each lane gets the one kDistance further, round the end.
template <int kDistance, int... kLane>
XLA_GPU_INLINE VecF Rotate(VecF a, std::integer_sequence<int, kLane...>) {
  return XLA_GPU_SHUFFLE(a, a, ((kLane + kDistance) % kLanes)...);
}

// Transposes a square of kLanes vectors: each round of interleaving a[i] with a[i + kLanes / 2] moves one bit of the
// row index into the lane index.
XLA_GPU_INLINE void Transpose(VecF (&a)[kLanes]) {
  XLA_GPU_UNROLL
  for (int round = 1; round < kLanes; round *= 2) {
    VecF b[kLanes];
    XLA_GPU_UNROLL
    for (int i = 0; i < kLanes / 2; ++i) {
      b[2 * i] = InterleaveLow(a[i], a[i + kLanes / 2], Lanes());
      b[2 * i + 1] = InterleaveHigh(a[i], a[i + kLanes / 2], Lanes());
    }
    XLA_GPU_UNROLL
    for (int i = 0; i < kLanes; ++i) a[i] = b[i];
  }
}

// ---- Reducing ------------------------------------------------------------------------------------------------------

XLA_GPU_INLINE VecF Max(VecF a, VecF b) { return a > b ? a : b; }  // b where one of them is NaN

// Lane i of the result is the sum of a[i]'s lanes.
XLA_GPU_INLINE VecF SumEach(VecF (&a)[kLanes]) {
  XLA_GPU_UNROLL
  for (int count = kLanes / 2; count > 0; count /= 2) {
    XLA_GPU_UNROLL
    for (int i = 0; i < count; ++i) {
      a[i] = InterleaveLow(a[i], a[i + count], Lanes()) + InterleaveHigh(a[i], a[i + count], Lanes());
    }
  }
  return a[0];
}

template <int kDistance = kLanes / 2>
XLA_GPU_INLINE float SumLanes(VecF a) {
  a += Rotate<kDistance>(a, Lanes());
  if constexpr (kDistance > 1) return SumLanes<kDistance / 2>(a);
  return a[0];
}

template <int kDistance = kLanes / 2>
XLA_GPU_INLINE float MaxLanes(VecF a) {
  a = Max(a, Rotate<kDistance>(a, Lanes()));
  if constexpr (kDistance > 1) return MaxLanes<kDistance / 2>(a);
  return a[0];
}

// ---- Functions -----------------------------------------------------------------------------------------------------

// e^x for x < 88, within 2 ulp; 0 where the result would be subnormal; NaN stays NaN.
XLA_GPU_INLINE VecF Exp(VecF x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is then the low bits of the sum.
  const VecF magic = Broadcast(0x1.8p23f);
  const VecF shifted = x * 0x1.715476p0f + magic;
  const VecF n = shifted - magic;
  const VecF r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts, the first of 15 bits
  // A fit of (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2 that makes e^r's relative error 3e-9.
  VecF p = r * 0x1.6a241ap-10f + 0x1.1239f2p-7f;
  p = p * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  const VecF mantissa = (p * r) * r + r + 1.0f;
  const VecF power = BitsToF((BitsOf(shifted) - BitsOf(magic) + 127u) << 23);
  return x < -87.33654f ? VecF{} : mantissa * power;
}

// Within 4 ulp; NaN stays NaN.
XLA_GPU_INLINE VecF Tanh(VecF x) {
  const VecU sign = BitsOf(x) & 0x80000000u;
  const VecF magnitude = BitsToF(BitsOf(x) ^ sign);
  // Near zero 1 - 2 / (e^2x + 1) cancels; there a fit of (tanh(x) / x - 1) / x^2, relative error 4e-9.
  const VecF z = x * x;
  VecF p = z * -0.005717045f + 0.020650588f;
  p = p * z - 0.053743497f;
  p = p * z + 0.13331491f;
  p = p * z - 0.33333284f;
  const VecF small = (p * z) * magnitude + magnitude;
  const VecF capped = magnitude > 10.0f ? Broadcast(10.0f) : magnitude;  // tanh(10) is 1 in float32
  const VecF large = 1.0f - 2.0f / (Exp(capped + capped) + 1.0f);
  return BitsToF(BitsOf(magnitude < 0.625f ? small : large) | sign);
}

// ---- Element types: how kLanes stored numbers become float32 -------------------------------------------------------

// The first 8 of kLanes numbers, the rest 0: the end of a row whose length is a multiple of 8 but not of kLanes.
template <class Element>
XLA_GPU_INLINE VecF LoadEight(const typename Element::Stored* from) {
  typename Element::Stored padded[kLanes > 8 ? kLanes : 8] = {};
  memcpy(padded, from, 8 * sizeof(padded[0]));
  return Element::Load(padded);
}

// NOTE: written out because GCC takes vectors of small integers apart to widen them. The zero-masked intrinsics do the
// same as the plain ones, whose undefined operand GCC 12 warns about.
XLA_GPU_INLINE VecU HalvesToU(VecU16 halves) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecU>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(halves)));
#elif defined(__AVX2__)
  return reinterpret_cast<VecU>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(halves)));
#else
  return __builtin_convertvector(halves, VecU);
#endif
}

XLA_GPU_INLINE VecU BytesToU(VecU8 bytes) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecU>(_mm512_maskz_cvtepu8_epi32(0xffff, reinterpret_cast<__m128i>(bytes)));
#elif defined(__AVX2__)
  const auto eight = reinterpret_cast<int64_t>(bytes);
  return reinterpret_cast<VecU>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight)));
#else
  return VecU{bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
}

struct Float32 {
  typedef float Stored;
  static XLA_GPU_INLINE VecF Load(const Stored* from) { return LoadF(from); }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static XLA_GPU_INLINE VecF Load(const Stored* from) { return BitsToF(HalvesToU(LoadAs<VecU16>(from)) << 16); }
};

XLA_GPU_INLINE VecF Float16ToF(VecU16 half) {
#if defined(__AVX512F__)
  return reinterpret_cast<VecF>(_mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(half)));
#elif defined(__F16C__) && defined(__AVX2__)
  return reinterpret_cast<VecF>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(half)));
#elif defined(__aarch64__)
  return reinterpret_cast<VecF>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(half)));
#else
  const VecU bits = HalvesToU(half);
  const VecU magnitude = bits & 0x7fffu;
  const VecU normal = (magnitude << 13) + (112u << 23);
  const VecU special = normal + (112u << 23);  // infinities and NaN
  const VecU subnormal = BitsOf(__builtin_convertvector(reinterpret_cast<VecI>(magnitude), VecF) * 0x1p-24f);
  const VecU absolute = magnitude < 0x0400u ? subnormal : magnitude < 0x7c00u ? normal : special;
  return BitsToF(absolute | (bits & 0x8000u) << 16);
#endif
}

struct Float16 {
  typedef uint16_t Stored;
  static XLA_GPU_INLINE VecF Load(const Stored* from) { return Float16ToF(LoadAs<VecU16>(from)); }
};

struct Float8E5M2 {  // the upper byte of a float16
  typedef uint8_t Stored;
  static XLA_GPU_INLINE VecF Load(const Stored* from) {
    return Float16ToF(__builtin_convertvector(LoadAs<VecU8>(from), VecU16) << 8);
  }
};

struct Float8E4M3FN {
  typedef uint8_t Stored;
  static XLA_GPU_INLINE VecF Load(const Stored* from) {
    const VecU bits = BytesToU(LoadAs<VecU8>(from));
    const VecU magnitude = bits & 0x7fu;
    const VecU normal = (magnitude << 20) + (120u << 23);
    const VecU subnormal = BitsOf(__builtin_convertvector(reinterpret_cast<VecI>(magnitude), VecF) * 0x1p-9f);
    const VecU finite = magnitude < 8u ? subnormal : normal;
    const VecU absolute = magnitude == 0x7fu ? VecU{} + 0x7fc00000u : finite;
    return BitsToF(absolute | (bits & 0x80u) << 24);
  }
};

}  // namespace XLA_GPU_SIMD_NAMESPACE
}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_SIMD_H_
