// wgmma of float8_e4m3 operands with 8 to 64 columns: c = a · b, or c += a · b where `add`; 64 × 32 by 32 × N.
// A is in registers, spread over the lanes as LoadMatrix4 does, B in shared memory, K-major. See wgmma.cuh.
//
// NOTE: the tensor cores of sm_90 add the products of an instruction and the accumulator with 13 bits behind the
// leading bit of the largest of them, and cut the others off there.
#ifndef XLA_GPU_DEVICE_WGMMA_FLOAT8_CUH_
#define XLA_GPU_DEVICE_WGMMA_FLOAT8_CUH_

#include <cstdint>

#include "ffi/device/wgmma.cuh"

namespace xla_gpu {

#define XLA_GPU_C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define XLA_GPU_C16(n) XLA_GPU_C4(n), XLA_GPU_C4(n + 1), XLA_GPU_C4(n + 2), XLA_GPU_C4(n + 3)
#define XLA_GPU_REGISTERS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"

#define XLA_GPU_WGMMA_FLOAT8(kBlocks, SHAPE, REGISTERS, D0, D1, D2, D3, D4, D5, ...)                       \
  __device__ inline void WgmmaFloat8(float(&c)[kBlocks][4], const uint32_t(&a)[4], uint64_t b, bool add) { \
    asm volatile("{ .reg .pred add; setp.ne.b32 add, " D5 ", 0; wgmma.mma_async.sync.aligned." SHAPE       \
                 ".f32.e4m3.e4m3 {" REGISTERS "}, {" D0 "," D1 "," D2 "," D3 "}, " D4 ", add, 1, 1; }"     \
                 : __VA_ARGS__                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));        \
  }

XLA_GPU_WGMMA_FLOAT8(1, "m64n8k32", "%0,%1,%2,%3", "%4", "%5", "%6", "%7", "%8", "%9", XLA_GPU_C4(0))
XLA_GPU_WGMMA_FLOAT8(2, "m64n16k32", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", "%10", "%11", "%12", "%13", XLA_GPU_C4(0),
                     XLA_GPU_C4(1))
XLA_GPU_WGMMA_FLOAT8(3, "m64n24k32", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11", "%12", "%13", "%14", "%15", "%16", "%17",
                     XLA_GPU_C4(0), XLA_GPU_C4(1), XLA_GPU_C4(2))
XLA_GPU_WGMMA_FLOAT8(4, "m64n32k32", XLA_GPU_REGISTERS_16, "%16", "%17", "%18", "%19", "%20", "%21", XLA_GPU_C16(0))
XLA_GPU_WGMMA_FLOAT8(6, "m64n48k32", XLA_GPU_REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23", "%24", "%25", "%26",
                     "%27", "%28", "%29", XLA_GPU_C16(0), XLA_GPU_C4(4), XLA_GPU_C4(5))
XLA_GPU_WGMMA_FLOAT8(8, "m64n64k32",
                     XLA_GPU_REGISTERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31", "%32",
                     "%33", "%34", "%35", "%36", "%37", XLA_GPU_C16(0), XLA_GPU_C16(4))

#undef XLA_GPU_C4
#undef XLA_GPU_C16
#undef XLA_GPU_REGISTERS_16
#undef XLA_GPU_WGMMA_FLOAT8

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_WGMMA_FLOAT8_CUH_
