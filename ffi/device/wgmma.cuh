// Products of a warpgroup (four warps) on the tensor cores of sm_90a: 64 × N += 64 × 16 by 16 × N, 16-bit operands,
// float32 sums, running in the background. B, and A where it is not in registers, lie in shared memory in tiles of 64
// elements × rows, 128 bytes a row, the 16-byte chunks of row r permuted by XOR with r % 8; tiles are aligned to 1024
// bytes. Warp w of the group has rows 16w to 16w + 15; within them A and C are spread over the lanes as in mma.cuh.
#ifndef XLA_GPU_DEVICE_WGMMA_CUH_
#define XLA_GPU_DEVICE_WGMMA_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace xla_gpu {

// What the hardware needs to know of an operand whose rows are 16-element steps of the product's inner dimension (A,
// and B stored as N rows). `shared`: address of the first row, plus 32 bytes for each step inside the 64 elements.
// `group_bytes`: from one group of 8 rows to the next.
__device__ inline uint64_t DescribeRows(uint32_t shared, uint32_t group_bytes = 1024) {
  return (shared & 0x3ffff) >> 4 | uint64_t{1} << 16 | static_cast<uint64_t>(group_bytes >> 4) << 32 |
         uint64_t{1} << 62;
}

// B stored the other way, as rows of the inner dimension. `tile_bytes`: from one tile of 64 columns to the next.
// `shared`: address of the first row of the step. `group_bytes`: from one group of 8 rows to the next.
__device__ inline uint64_t DescribeColumns(uint32_t shared, uint32_t tile_bytes, uint32_t group_bytes = 1024) {
  return (shared & 0x3ffff) >> 4 | static_cast<uint64_t>(tile_bytes >> 4) << 16 |
         static_cast<uint64_t>(group_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// A description of what lies `bytes` further on. Only the lower half changes, in one instruction.
__device__ inline uint64_t Further(uint64_t description, int bytes) {
  uint64_t further;
  asm("{ .reg .b32 low, high; mov.b64 {low, high}, %1; add.s32 low, low, %2; mov.b64 %0, {low, high}; }"
      : "=l"(further)
      : "l"(description), "r"(bytes >> 4));
  return further;
}

// Before the first product that reads or adds to registers which were written otherwise.
__device__ inline void FenceWgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void CommitWgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void WaitWgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// After the wait for the products that write `c`: keeps the compiler from reading it earlier.
template <int kN>
__device__ inline void ReadAfterWgmma(float (&c)[kN][4]) {
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

// c = a · b, or c += a · b where `add`. Both described by DescribeRows.
template <typename T>
__device__ inline void Wgmma(float (&c)[8][4], uint64_t a, uint64_t b, bool add) {
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
__device__ inline void Wgmma(float (&c)[16][4], uint64_t a, uint64_t b, bool add) {
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
__device__ inline void Wgmma(float (&c)[10][4], uint64_t a, uint64_t b, bool add) {
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
__device__ inline void Wgmma(float (&c)[14][4], uint64_t a, uint64_t b, bool add) {
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

// c += a · b, with b described by DescribeColumns.
template <typename T>
__device__ inline void WgmmaColumns(float (&c)[8][4], const uint32_t (&a)[4], uint64_t b) {
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
__device__ inline void WgmmaColumns(float (&c)[16][4], const uint32_t (&a)[4], uint64_t b) {
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
__device__ inline void WgmmaColumns(float (&c)[32][4], const uint32_t (&a)[4], uint64_t b) {
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
