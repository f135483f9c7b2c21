// Rings of stages in shared memory, which producers fill and consumers read, with a full and an empty barrier for each
// stage; and the other things that both sm_90a prefill kernels do with registers and shared memory.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PIPELINE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PIPELINE_CUH_

#include <cstddef>
#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"

namespace xla_gpu::prefill {

// The barriers of a stage, in shared memory.
struct StageBarriers {
  uint64_t full;   // the stage has been filled
  uint64_t empty;  // all consumers have read it
};
static_assert(sizeof(StageBarriers) == 16 && alignof(StageBarriers) == 8);

// A position in a ring of kStages stages, and the parity of the rounds gone: what barriers are waited with. Two
// pipelines can share a ring, each with every second stage: kFirst = 0 and 1, kStep = 2.
template <int kStages, int kFirst = 0, int kStep = 1>
struct PipelineState {
  int stage = kFirst;
  uint32_t phase = 0;
  __device__ void Advance() {
    stage += kStep;
    if (stage >= kStages) {
      stage -= kStages;
      phase ^= 1;
    }
  }
  // As `count` times Advance().
  __device__ void Skip(int count) {
    static_assert(kFirst == 0 && kStep == 1);
    const auto end = static_cast<unsigned>(stage + count);
    phase ^= end / kStages & 1;
    stage = static_cast<int>(end % kStages);
  }
};

// A pipeline's barriers. kParts: a stage consists of so many parts, with barriers of their own.
template <typename PipelineStateOfRing, int kParts = 1>
struct Pipeline {
  using State = PipelineStateOfRing;

  uint32_t barriers;  // shared-memory address of StageBarriers[stages][kParts]

  __device__ uint32_t Full(State state, int part = 0) const {
    return barriers + (state.stage * kParts + part) * static_cast<int>(sizeof(StageBarriers));
  }
  __device__ uint32_t Empty(State state, int part = 0) const {
    return Full(state, part) + static_cast<int>(offsetof(StageBarriers, empty));
  }
  // Consumers wait until the stage is full; producers until it is empty, which it is at first.
  __device__ void WaitFull(State state, int part = 0) const { WaitBarrier(Full(state, part), state.phase); }
  __device__ void WaitEmpty(State state, int part = 0) const { WaitBarrier(Empty(state, part), state.phase ^ 1); }
  // Whether the stage is full now.
  __device__ bool IsFull(State state) const { return HasPassed(Full(state), state.phase); }
};

// One arrival for a warp, once all its lanes are here.
__device__ inline void ArriveFromWarp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) ArriveBarrier(barrier);
}
// `count` of them.
__device__ inline void ArriveFromWarp(uint32_t barrier, int lane, int count) {
  __syncwarp();
  if (lane == 0) ArriveBarrier(barrier, count);
}

// Byte offset of 16-byte vector `vec` of row `row` with the 128-byte swizzle, in columns of 64 elements that are
// `column_bytes` apart.
__device__ inline int SwizzledOffset(int column_bytes, int row, int vec) {
  return vec / 8 * column_bytes + row * 128 + ((vec ^ row) & 7) * 16;
}

// Packs the numerators of the key steps [kFirst, kEnd), 16 keys each, as T: two accumulator tiles side by side have the
// layout of a wgmma's A operand in registers.
template <typename T, int kFirst, int kEnd, int kKeyTiles>
__device__ void PackNumerators(const float (&s)[kKeyTiles][4], uint32_t (&p)[kKeyTiles / 2][4]) {
#pragma unroll
  for (int n = kFirst * 2; n < kEnd * 2; ++n) {
    p[n / 2][n % 2 * 2] = Pack<T>(s[n][0], s[n][1]);
    p[n / 2][n % 2 * 2 + 1] = Pack<T>(s[n][2], s[n][3]);
  }
}
template <typename T, int kKeyTiles>
__device__ void PackNumerators(const float (&s)[kKeyTiles][4], uint32_t (&p)[kKeyTiles / 2][4]) {
  PackNumerators<T, 0, kKeyTiles / 2>(s, p);
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_PIPELINE_CUH_
