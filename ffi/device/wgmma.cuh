// wgmma: asynchronous matrix products of a warpgroup (four warps) on the tensor cores of sm_90a. 64 × N += 64 × 16 by
// 16 × N, 16-bit operands, float32 accumulators. B, and A where it is not in registers, lie in shared memory with the
// 128-byte swizzle: atoms of 8 rows of 128 bytes, aligned to 1024 bytes, the 16-byte vectors of row r permuted by XOR
// with r % 8. Warp w has rows 16w to 16w + 15; within them A and C are spread over the lanes as in mma.cuh.
#ifndef XLA_GPU_DEVICE_WGMMA_CUH_
#define XLA_GPU_DEVICE_WGMMA_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

// Only code for sm_90a has wgmma and setmaxnreg. Compiled for other targets, kernels that use them are empty and are
// never launched.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define XLA_GPU_HAS_WGMMA 1
#else
#define XLA_GPU_HAS_WGMMA 0
#endif

namespace xla_gpu {

// setmaxnreg: a warpgroup gives back registers of its threads, or waits for more. All four warps, in converged code.
template <int kRegisters>
__device__ inline void DecreaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void IncreaseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The shared-memory descriptor of a K-major operand: its rows run along the product's inner dimension (A, and B stored
// as N rows). `shared`: address of the first row, plus 32 bytes for each step of 16 elements inside an atom.
// `atom_bytes`: from one atom to the next 8 rows' (the stride byte offset).
__device__ inline uint64_t MakeSmemDescKMajor(uint32_t shared, uint32_t atom_bytes = 1024) {
  return (shared & 0x3ffff) >> 4 | uint64_t{1} << 16 | static_cast<uint64_t>(atom_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// The same of an MN-major operand: B stored as rows of the inner dimension. `shared`: address of the step's first row.
// `column_bytes`: from one atom to the next 64 columns' (the leading byte offset). `atom_bytes`: to the next 8 rows'.
__device__ inline uint64_t MakeSmemDescMnMajor(uint32_t shared, uint32_t column_bytes, uint32_t atom_bytes = 1024) {
  return (shared & 0x3ffff) >> 4 | static_cast<uint64_t>(column_bytes >> 4) << 16 |
         static_cast<uint64_t>(atom_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// The descriptor of what lies `bytes` further on. Only the lower half changes: one instruction.
__device__ inline uint64_t AdvanceSmemDesc(uint64_t desc, int bytes) {
  uint64_t advanced;
  asm("{ .reg .b32 low, high; mov.b64 {low, high}, %1; add.s32 low, low, %2; mov.b64 %0, {low, high}; }"
      : "=l"(advanced)
      : "l"(desc), "r"(bytes >> 4));
  return advanced;
}

// Must come before the first wgmma that reads or accumulates into registers which other instructions have written.
__device__ inline void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from reading the accumulators `c` before this point. Follows the wait for the products.
template <int kN>
__device__ inline void WgmmaFenceOperand(float (&c)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}

#define XLA_GPU_C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define XLA_GPU_C32(n)                                                                                          \
  XLA_GPU_C4(n), XLA_GPU_C4(n + 1), XLA_GPU_C4(n + 2), XLA_GPU_C4(n + 3), XLA_GPU_C4(n + 4), XLA_GPU_C4(n + 5), \
      XLA_GPU_C4(n + 6), XLA_GPU_C4(n + 7)
#define XLA_GPU_REGISTERS_32                                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20," \
  "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define XLA_GPU_REGISTERS_64                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"   \
  "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39," \
  "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
  "%59,%60,%61,%62,%63"
#define XLA_GPU_REGISTERS_128                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,"    \
  "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"  \
  "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"  \
  "%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,"  \
  "%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,"  \
  "%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
  "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define XLA_GPU_REGISTERS_40                                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define XLA_GPU_REGISTERS_56                                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"

// c = a · b, or c += a · b where `add`; A and B from shared memory, both K-major.
template <typename T>
__device__ inline void WgmmaSS(float (&c)[8][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" XLA_GPU_REGISTERS_32 "}, %32, %33, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_32 "}, %32, %33, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
}

template <typename T>
__device__ inline void WgmmaSS(float (&c)[16][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" XLA_GPU_REGISTERS_64 "}, %64, %65, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0), XLA_GPU_C32(8)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_64 "}, %64, %65, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0), XLA_GPU_C32(8)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
}

template <typename T>
__device__ inline void WgmmaSS(float (&c)[10][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %42, 0; "
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.f16.f16 {" XLA_GPU_REGISTERS_40 "}, %40, %41, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %42, 0; "
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_40 "}, %40, %41, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
}

template <typename T>
__device__ inline void WgmmaSS(float (&c)[14][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %58, 0; "
        "wgmma.mma_async.sync.aligned.m64n112k16.f32.f16.f16 {" XLA_GPU_REGISTERS_56 "}, %56, %57, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9), XLA_GPU_C4(10), XLA_GPU_C4(11), XLA_GPU_C4(12), XLA_GPU_C4(13)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %58, 0; "
        "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_56 "}, %56, %57, add, 1, 1, 0, 0; }"
        : XLA_GPU_C32(0), XLA_GPU_C4(8), XLA_GPU_C4(9), XLA_GPU_C4(10), XLA_GPU_C4(11), XLA_GPU_C4(12), XLA_GPU_C4(13)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
}

// c += a · b; A from registers, B from shared memory, MN-major.
template <typename T>
__device__ inline void WgmmaRS(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" XLA_GPU_REGISTERS_32
        "}, {%32,%33,%34,%35}, %36, add, 1, 1, 1; }"
        : XLA_GPU_C32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_32
        "}, {%32,%33,%34,%35}, %36, add, 1, 1, 1; }"
        : XLA_GPU_C32(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

template <typename T>
__device__ inline void WgmmaRS(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" XLA_GPU_REGISTERS_64
        "}, {%64,%65,%66,%67}, %68, add, 1, 1, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C32(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_64
        "}, {%64,%65,%66,%67}, %68, add, 1, 1, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C32(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

template <typename T>
__device__ inline void WgmmaRS(float (&c)[32][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" XLA_GPU_REGISTERS_128
        "}, {%128,%129,%130,%131}, %132, add, 1, 1, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C32(8), XLA_GPU_C32(16), XLA_GPU_C32(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "{ .reg .pred add; setp.eq.b32 add, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" XLA_GPU_REGISTERS_128
        "}, {%128,%129,%130,%131}, %132, add, 1, 1, 1; }"
        : XLA_GPU_C32(0), XLA_GPU_C32(8), XLA_GPU_C32(16), XLA_GPU_C32(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

#undef XLA_GPU_C4
#undef XLA_GPU_C32
#undef XLA_GPU_REGISTERS_32
#undef XLA_GPU_REGISTERS_40
#undef XLA_GPU_REGISTERS_56
#undef XLA_GPU_REGISTERS_64
#undef XLA_GPU_REGISTERS_128

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_WGMMA_CUH_
