// wgmma with column counts that only this kernel has, as in ffi/device/wgmma.cuh: scores of 32 and 96 keys, and heads
// of 80 and 96 elements.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_WGMMA_CUH_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_WGMMA_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ffi/device/wgmma.cuh"

namespace xla_gpu {

#define XLA_GPU_C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define XLA_GPU_C32(n)                                                                                          \
  XLA_GPU_C4(n), XLA_GPU_C4(n + 1), XLA_GPU_C4(n + 2), XLA_GPU_C4(n + 3), XLA_GPU_C4(n + 4), XLA_GPU_C4(n + 5), \
      XLA_GPU_C4(n + 6), XLA_GPU_C4(n + 7)
#define XLA_GPU_REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define XLA_GPU_REGISTERS_40                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
  "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define XLA_GPU_REGISTERS_48                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
  "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"

// c = (add ? c : 0) + a · b; A and B from shared memory, K-major.
template <typename T>
__device__ inline void WgmmaSS(float (&c)[4][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {" XLA_GPU_REGISTERS_16 "}, %16, %17, add, 1, 1, 0, 0; }"
        : XLA_GPU_C4(0), XLA_GPU_C4(1), XLA_GPU_C4(2), XLA_GPU_C4(3)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_16 "}, %16, %17, add, 1, 1, 0, 0; }"
        : XLA_GPU_C4(0), XLA_GPU_C4(1), XLA_GPU_C4(2), XLA_GPU_C4(3)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
}

template <typename T>
__device__ inline void WgmmaSS(float (&c)[12][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %50, 0; "
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" XLA_GPU_REGISTERS_48 "}, %48, %49, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9), XLA_GPU_C4(10), XLA_GPU_C4(11)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %50, 0; "
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_48 "}, %48, %49, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9), XLA_GPU_C4(10), XLA_GPU_C4(11)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
}

// c += a · b; A from registers, B from shared memory, MN-major.
template <typename T>
__device__ inline void WgmmaRS(float (&c)[10][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" XLA_GPU_REGISTERS_40
        "}, {%40,%41,%42,%43}, %44, add, 1, 1, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_40
        "}, {%40,%41,%42,%43}, %44, add, 1, 1, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

template <typename T>
__device__ inline void WgmmaRS(float (&c)[12][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 {" XLA_GPU_REGISTERS_48
        "}, {%48,%49,%50,%51}, %52, add, 1, 1, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9), XLA_GPU_C4(10), XLA_GPU_C4(11)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_48
        "}, {%48,%49,%50,%51}, %52, add, 1, 1, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9), XLA_GPU_C4(10), XLA_GPU_C4(11)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

#undef XLA_GPU_C4
#undef XLA_GPU_C32
#undef XLA_GPU_REGISTERS_16
#undef XLA_GPU_REGISTERS_40
#undef XLA_GPU_REGISTERS_48

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_SM90_WGMMA_CUH_
