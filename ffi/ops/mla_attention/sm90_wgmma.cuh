// wgmma in the forms that these kernels alone have, as in ffi/device/wgmma.cuh: values with numerators from shared
// memory.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_WGMMA_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_WGMMA_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ffi/device/wgmma.cuh"

namespace xla_gpu {

#define XLA_GPU_C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define XLA_GPU_C32(n)                                                                                          \
  XLA_GPU_C4(n), XLA_GPU_C4(n + 1), XLA_GPU_C4(n + 2), XLA_GPU_C4(n + 3), XLA_GPU_C4(n + 4), XLA_GPU_C4(n + 5), \
      XLA_GPU_C4(n + 6), XLA_GPU_C4(n + 7)
#define XLA_GPU_REGISTERS_128                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"    \
  "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"  \
  "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"  \
  "%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,"  \
  "%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,"  \
  "%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
  "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// c += a · b; A from shared memory, K-major, B from shared memory, MN-major.
template <typename T>
__device__ inline void WgmmaSSMnMajor(float (&c)[32][4], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" XLA_GPU_REGISTERS_128
        "}, %128, %129, add, 1, 1, 0, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C32(8), XLA_GPU_C32(16), XLA_GPU_C32(24)
        : "l"(a), "l"(b));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_128
        "}, %128, %129, add, 1, 1, 0, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C32(8), XLA_GPU_C32(16), XLA_GPU_C32(24)
        : "l"(a), "l"(b));
  }
}

// c += a · b; A from shared memory, MN-major (stored as rows of the inner dimension), B from shared memory, K-major.
#define XLA_GPU_WGMMA_MN_MAJOR_A(kBlocks, SHAPE, REGISTERS, D0, D1, ...)                          \
  template <typename T>                                                                           \
  __device__ inline void WgmmaMnMajorA(float(&c)[kBlocks][4], uint64_t a, uint64_t b) {           \
    if constexpr (std::is_same_v<T, __half>) {                                                    \
      asm volatile("{ .reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned." SHAPE \
                   ".f32.f16.f16 {" REGISTERS "}, " D0 ", " D1 ", add, 1, 1, 1, 0; }"             \
                   : __VA_ARGS__                                                                  \
                   : "l"(a), "l"(b));                                                             \
    } else {                                                                                      \
      asm volatile("{ .reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned." SHAPE \
                   ".f32.bf16.bf16 {" REGISTERS "}, " D0 ", " D1 ", add, 1, 1, 1, 0; }"           \
                   : __VA_ARGS__                                                                  \
                   : "l"(a), "l"(b));                                                             \
    }                                                                                             \
  }

XLA_GPU_WGMMA_MN_MAJOR_A(2, "m64n16k16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", XLA_GPU_C4(0), XLA_GPU_C4(1))
XLA_GPU_WGMMA_MN_MAJOR_A(4, "m64n32k16", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17",
                         XLA_GPU_C4(0), XLA_GPU_C4(1), XLA_GPU_C4(2), XLA_GPU_C4(3))

#undef XLA_GPU_C4
#undef XLA_GPU_C32
#undef XLA_GPU_REGISTERS_128
#undef XLA_GPU_WGMMA_MN_MAJOR_A

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_WGMMA_CUH_
