// Matrix products of a warp on 16-bit operands with float32 accumulators (mma.m16n8k16), and the loads and conversions
// that feed them. With g = lane / 4 and t = lane % 4, a lane holds
//   A: rows g (a[0], a[2]) and g + 8 (a[1], a[3]), columns 2t, 2t + 1 (a[0], a[1]) and 2t + 8, 2t + 9 (a[2], a[3]);
//   B: column g, rows 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1);
//   C: row g (c[0], c[1]) and g + 8 (c[2], c[3]), columns 2t and 2t + 1.
#ifndef XLA_GPU_DEVICE_MMA_CUH_
#define XLA_GPU_DEVICE_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace xla_gpu {

template <typename T>
__device__ inline void Mma16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void Mma16x8x16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void Mma16x8x16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8×8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void LoadMatrix4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

__device__ inline void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Two floats as a register of two T, `low` in the lower half.
template <typename T>
__device__ inline uint32_t Pack(float low, float high);

template <>
__device__ inline uint32_t Pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <>
__device__ inline uint32_t Pack<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename T>
__device__ inline float2 Unpack(uint32_t pair);

template <>
__device__ inline float2 Unpack<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

template <>
__device__ inline float2 Unpack<__half>(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

// The lower two bytes, float8 values, as two float16 values: exact.
template <__nv_fp8_interpretation_t kKind>
__device__ inline uint32_t Float8PairToHalf2(uint32_t bytes) {
  if constexpr (kKind == __NV_E5M2) {
    return __byte_perm(bytes, 0, 0x1404);  // e5m2 is the upper byte of a float16
  } else {
    const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes & 0xffff), kKind);
    return pair.x | static_cast<uint32_t>(pair.y) << 16;
  }
}

// 2^x, with one instruction; 0 for -inf, NaN for NaN.
__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), with one instruction: a relative error of 2^-11 (PTX ISA, tanh.approx.f32); ±1 for ±infinity, NaN for NaN.
__device__ inline float TanhApprox(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_MMA_CUH_
