// wgmma with 8, 16, 24, 32, 48 or 64 columns and B in shared memory, K-major: c = a · b, or c += a · b where `add`. A
// is in shared memory too (WgmmaNarrow with a descriptor), K-major, or in registers. See wgmma.cuh.
#ifndef XLA_GPU_DEVICE_WGMMA_NARROW_CUH_
#define XLA_GPU_DEVICE_WGMMA_NARROW_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ffi/device/wgmma.cuh"

namespace xla_gpu {

#define XLA_GPU_C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define XLA_GPU_C16(n) XLA_GPU_C4(n), XLA_GPU_C4(n + 1), XLA_GPU_C4(n + 2), XLA_GPU_C4(n + 3)
#define XLA_GPU_C8(n) XLA_GPU_C4(n), XLA_GPU_C4(n + 1)
#define XLA_GPU_REGISTERS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define XLA_GPU_REGISTERS_16 XLA_GPU_REGISTERS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define XLA_GPU_REGISTERS_24 XLA_GPU_REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"

// Operands: %D to %D+2 for descriptors of A and B and for `add`; with A in registers %D to %D+5.
#define XLA_GPU_WGMMA_NARROW(kBlocks, SHAPE, REGISTERS, D0, D1, D2, D3, D4, D5, ...)                        \
  template <typename T>                                                                                     \
  __device__ inline void WgmmaNarrow(float(&c)[kBlocks][4], uint64_t a, uint64_t b, bool add) {             \
    if constexpr (std::is_same_v<T, __half>) {                                                              \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " D2 ", 0; wgmma.mma_async.sync.aligned." SHAPE      \
                   ".f32.f16.f16 {" REGISTERS "}, " D0 ", " D1 ", add, 1, 1, 0, 0; }"                       \
                   : __VA_ARGS__                                                                            \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
    } else {                                                                                                \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " D2 ", 0; wgmma.mma_async.sync.aligned." SHAPE      \
                   ".f32.bf16.bf16 {" REGISTERS "}, " D0 ", " D1 ", add, 1, 1, 0, 0; }"                     \
                   : __VA_ARGS__                                                                            \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                           \
    }                                                                                                       \
  }                                                                                                         \
  template <typename T>                                                                                     \
  __device__ inline void WgmmaNarrow(float(&c)[kBlocks][4], const uint32_t(&a)[4], uint64_t b, bool add) {  \
    if constexpr (std::is_same_v<T, __half>) {                                                              \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " D5 ", 0; wgmma.mma_async.sync.aligned." SHAPE      \
                   ".f32.f16.f16 {" REGISTERS "}, {" D0 "," D1 "," D2 "," D3 "}, " D4 ", add, 1, 1, 0; }"   \
                   : __VA_ARGS__                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));       \
    } else {                                                                                                \
      asm volatile("{ .reg .pred add; setp.ne.b32 add, " D5 ", 0; wgmma.mma_async.sync.aligned." SHAPE      \
                   ".f32.bf16.bf16 {" REGISTERS "}, {" D0 "," D1 "," D2 "," D3 "}, " D4 ", add, 1, 1, 0; }" \
                   : __VA_ARGS__                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));       \
    }                                                                                                       \
  }

XLA_GPU_WGMMA_NARROW(1, "m64n8k16", "%0,%1,%2,%3", "%4", "%5", "%6", "%7", "%8", "%9", XLA_GPU_C4(0))
XLA_GPU_WGMMA_NARROW(2, "m64n16k16", XLA_GPU_REGISTERS_8, "%8", "%9", "%10", "%11", "%12", "%13", XLA_GPU_C8(0))
XLA_GPU_WGMMA_NARROW(3, "m64n24k16", XLA_GPU_REGISTERS_8 ",%8,%9,%10,%11", "%12", "%13", "%14", "%15", "%16", "%17",
                     XLA_GPU_C8(0), XLA_GPU_C4(2))
XLA_GPU_WGMMA_NARROW(4, "m64n32k16", XLA_GPU_REGISTERS_16, "%16", "%17", "%18", "%19", "%20", "%21", XLA_GPU_C16(0))
XLA_GPU_WGMMA_NARROW(6, "m64n48k16", XLA_GPU_REGISTERS_24, "%24", "%25", "%26", "%27", "%28", "%29", XLA_GPU_C16(0),
                     XLA_GPU_C8(4))
XLA_GPU_WGMMA_NARROW(8, "m64n64k16", XLA_GPU_REGISTERS_24 ",%24,%25,%26,%27,%28,%29,%30,%31", "%32", "%33", "%34",
                     "%35", "%36", "%37", XLA_GPU_C16(0), XLA_GPU_C16(4))

#undef XLA_GPU_C4
#undef XLA_GPU_C8
#undef XLA_GPU_C16
#undef XLA_GPU_REGISTERS_8
#undef XLA_GPU_REGISTERS_16
#undef XLA_GPU_REGISTERS_24
#undef XLA_GPU_WGMMA_NARROW

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_WGMMA_NARROW_CUH_
