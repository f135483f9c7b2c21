// The kernel of sm_90a for few rows and plain weights: for up to 8 rows, and for up to 48 where k is divided.
//
// TMA brings weights and x to shared memory, and warps multiply by mma.m16n8k16, whose M operand the weights are.
//  - No clusters: the parts of k belong to warps of one CTA, and a work tile is as small as gives each SM one. A CTA
//    waits for no other.
//  - One ring for all warps, of small stages, with one barrier for a stage's weights and its x, which different threads
//    load: weights may be loaded before the previous kernel has ended, x may not.
//  - Where a work tile has few features a stage has 256 bytes of each weight row: with 128 memory is slower.
//  - Little code in front of the first load and behind the last product: it runs once, and its instructions come from
//    L2.
//
// The parts of k, and the order of all sums, are those of sm90_kernel.cuh: a row has the same bits for any number of
// rows.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FEW_KERNEL_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FEW_KERNEL_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/device/tma_matrix.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/ops/linear/sm90_few_epilogue.cuh"
#include "ffi/ops/linear/sm90_few_traits.cuh"

namespace xla_gpu::linear {

// Calls `load` for all stages of all units in the order of the ring, when what had its place before has been read: with
// unit, chunk of k, place in the ring and the barrier of its load. `behind` is called behind each round.
template <typename Load, typename Behind>
__device__ __forceinline__ void ForEachStage(const Sm90FewArgs& args, const FewBarriers& barriers, const Load& load,
                                             const Behind& behind) {
  PipelineState slot, last_slot;  // of this round; of what has the next stage's place
  int stage = 0, last_unit = 0;
  bool again = false;
  for (int round = 0; round < args.rounds; ++round) {
    for (int unit = 0; unit < args.units; ++unit) {
      const int part = args.parts == 1 ? 0 : unit, chunk = args.chunk_begin[part] + round * args.columns;
      if (again) {
        // Also where this unit has no more chunks: all waits before it are what keeps slots separate.
        WaitBarrier(barriers.Empty(last_unit, last_slot.stage), last_slot.phase);
        if (++last_unit == args.units) last_unit = 0, last_slot.Advance(args.slots);
      }
      if (chunk < args.chunk_begin[part + 1]) load(unit, chunk, stage, barriers.Full(unit, slot.stage));
      if (++stage == args.weight_stages) stage = 0, again = true;
    }
    slot.Advance(args.slots);
    behind(round);
  }
}

// A box of a stage: [columns][rows of the box][128 bytes].
__device__ __forceinline__ void LoadFewBox(const Sm90FewArgs& args, uint32_t to, const CUtensorMap& map, uint32_t full,
                                           int chunk, int row, uint64_t l2_policy) {
  if (args.columns == 1) {
    TmaLoadMatrixBox(to, map, full, chunk, row, l2_policy);
  } else {
    TmaLoadMatrixColumns(to, map, full, chunk, row, l2_policy);
  }
}

// The weights of all stages, by one thread.
__device__ inline void LoadFewWeights(const Sm90FewArgs& args, int tile, uint32_t weights, FewBarriers barriers) {
  const int stage_bytes = args.unit_rows * 128 * args.columns, box_bytes = args.box_rows * 128 * args.columns;
  const int loaded_bytes = stage_bytes + args.x_rows * 128 * args.columns;
  // A unit's rows in each of two boxes, with an activation, or in one.
  const int rows_of_unit = args.parts == args.units ? 0 : args.box_rows;
  const int first_row = tile * (args.parts == args.units ? args.box_rows : 2 * args.box_rows);
  if (!args.weights_first) WaitForPreviousKernel();
  const auto load = [&](int unit, int chunk, int stage, uint32_t full) {
    const uint32_t to = weights + stage * stage_bytes;
    const int row = first_row + unit * rows_of_unit;
    ArriveExpectTx(full, loaded_bytes);
    LoadFewBox(args, to, args.weight_map, full, chunk, row, kEvictFirst);
    if (args.boxes == 2) {
      LoadFewBox(args, to + box_bytes, args.weight_map, full, chunk, row + args.linear.n / 2, kEvictFirst);
    }
  };
  ForEachStage(args, barriers, load, [&](int round) {
    if (round == args.launch_at) AllowDependentLaunch();
  });
}

// The x of all stages, by one thread.
__device__ inline void LoadFewX(const Sm90FewArgs& args, uint32_t xs, FewBarriers barriers) {
  const int x_bytes = args.x_rows * 128 * args.columns;
  WaitForPreviousKernel();
  const auto load = [&](int, int chunk, int stage, uint32_t full) {
    LoadFewBox(args, xs + stage * x_bytes, args.x_map, full, chunk, 0, kEvictNormal);
  };
  ForEachStage(args, barriers, load, [](int) {});
}

// The products of a warp's 16 weight rows, 8 of each half of its unit's, with one chunk of a stage. Returns bits that
// depend on all that has been read.
template <typename Config>
__device__ __forceinline__ uint32_t MultiplyChunk(uint32_t weights, uint32_t x, float (&sum)[Config::kRowTile / 8][4]) {
  using T = typename Config::T;
  uint32_t read = 0;
  if constexpr (Config::kRowTile == 8) {
    uint32_t b[2][4], a[4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) LoadMatrix4(b[half], x ^ half << 6);
#pragma unroll
    for (int step = 0; step < 4; ++step) LoadMatrix4(a[step], weights ^ step << 5);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      Mma16x8x16<T>(sum[0], a[step], b[step / 2][step % 2 * 2], b[step / 2][step % 2 * 2 + 1]);
      read |= a[step][0];
    }
    read |= b[0][0] | b[1][0];
  } else {
    constexpr int kPairs = Config::kRowTile / 16;  // of 8 rows
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t a[4], b[kPairs][4];
      LoadMatrix4(a, weights ^ step << 5);
      read |= a[0];
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        LoadMatrix4(b[pair], (x ^ step << 5) + pair * 16 * 128);
        read |= b[pair][0];
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        Mma16x8x16<T>(sum[2 * pair], a, b[pair][0], b[pair][1]);
        Mma16x8x16<T>(sum[2 * pair + 1], a, b[pair][2], b[pair][3]);
      }
    }
  }
  return read;
}

template <typename Config>
__device__ __forceinline__ void MultiplyFew(const Sm90FewArgs& args, int unit, int warp_of_unit, uint32_t weights,
                                            uint32_t xs, FewBarriers barriers, float (&sum)[Config::kRowTile / 8][4]) {
  constexpr bool kOneBlock = Config::kRowTile == 8;  // of rows: a matrix load has half a chunk of them
  const int lane = static_cast<int>(threadIdx.x) % 32, r = lane % 8;
  const int part = args.parts == 1 ? 0 : unit;
  const int chunks = args.chunk_begin[part + 1] - args.chunk_begin[part];
  const int x_column_bytes = args.x_rows * 128;
  const int stage_bytes = args.unit_rows * 128 * args.columns, x_bytes = x_column_bytes * args.columns;
  const uint32_t of_lane =
      weights + lane / 8 % 2 * args.half_bytes + (warp_of_unit * 8 + r) * 128 + ((lane / 16 ^ r) << 4);
  // Rows past those of the box are read as the last one, and nothing reads what becomes of them.
  const uint32_t x_of_lane = xs + (kOneBlock ? min(r, args.x_rows - 1) : lane / 16 * 8 + r) * 128;
  const auto none = static_cast<uint32_t>(args.chunks >> 31);  // 0, which the compiler does not know
#pragma unroll
  for (auto& block : sum) block[0] = block[1] = block[2] = block[3] = 0.0f;
  int stage = unit;
  PipelineState slot;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; chunk += args.columns) {
    uint32_t from = of_lane + stage * stage_bytes, x_row = x_of_lane + stage * x_bytes, read = 0;
    WaitBarrier(barriers.Full(unit, slot.stage), slot.phase);
    const int columns = min(args.columns, chunks - chunk);
#pragma unroll 1
    for (int column = 0; column < columns; ++column, from += args.column_bytes, x_row += x_column_bytes) {
      const int vector = kOneBlock ? lane / 8 : lane / 8 % 2;
      read |= MultiplyChunk<Config>(from, x_row + ((vector ^ (x_row >> 7 & 7)) << 4), sum);
    }
    __syncwarp();
    // An arrival does not wait for reads in front of it: this one needs what they have read.
    if (lane == 0) ArriveBarrier(barriers.Empty(unit, slot.stage) + (read & none));
    slot.Advance(args.slots);
    stage += args.units;
    if (stage >= args.weight_stages) stage -= args.weight_stages;
  }
}

template <typename Config>
__global__ void __launch_bounds__(XLA_GPU_HAS_WGMMA ? Config::kThreads : 32, XLA_GPU_HAS_WGMMA ? Config::kCtasOfSm : 1)
    FewSm90Kernel(const __grid_constant__ Sm90FewArgs args) {
#if XLA_GPU_HAS_WGMMA
  using T = typename Config::T;
  extern __shared__ __align__(1024) char shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = static_cast<int>(blockIdx.x);
  // ---- Shared memory: weights, x, barriers; sums, of up to 8 rows, or in the ring's place
  const int weight_bytes = args.weight_stages * args.unit_rows * 128 * args.columns;
  const int ring_bytes = weight_bytes + args.weight_stages * args.x_rows * 128 * args.columns;
  const uint32_t weights = SharedAddress(shared), xs = weights + weight_bytes;
  const FewBarriers barriers = {weights + ring_bytes, args.slots};
  if (warp == args.warps) {
    for (int i = lane; i < args.units * args.slots; i += 32) {
      InitBarrier(barriers.Full(0, i), 1);
      InitBarrier(barriers.Empty(0, i), args.unit_rows / 16);
    }
    if (lane < 2) PrefetchTensorMap(lane == 0 ? args.weight_map : args.x_map);
    FenceProxyAsync();
  }
  __syncthreads();
  if (warp >= args.warps) {
    if (ElectOne()) {
      if (warp == args.warps) {
        LoadFewWeights(args, tile, weights, barriers);
      } else {
        LoadFewX(args, xs, barriers);
      }
    }
    return;
  }
  const int unit = warp * args.inverse_of_warps >> 8, warp_of_unit = warp - unit * (args.unit_rows / 16);
  float sum[Config::kRowTile / 8][4];
  MultiplyFew<Config>(args, unit, warp_of_unit, weights, xs, barriers, sum);
  WaitForPreviousKernel();  // which may have written what is read below
  if constexpr (Config::kRowTile == 8) {
    if (args.parts == 1) {
      FinishOwn<T>(args, tile, unit, warp_of_unit, sum[0]);
      return;
    }
  } else {
    NamedBarrierSync(1, args.warps * 32);  // all stages have been read
  }
  const int rows = Config::kRowTile == 8 ? args.linear.rows : Config::kRowTile;
  auto* const sums =
      reinterpret_cast<float*>(Config::kRowTile == 8 ? shared + ring_bytes + Config::kBarrierBytes : shared);
  const int pitch = FewSumPitch(args.unit_rows), part_floats = rows * pitch, row = lane % 4 * 2;
  float* const to = sums + unit * part_floats + row * pitch + warp_of_unit * 8 + lane / 4;
#pragma unroll
  for (int block = 0; block < Config::kRowTile / 8; ++block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (Config::kRowTile == 8 && row + i >= rows) continue;
      to[(block * 8 + i) * pitch] = sum[block][i];
      to[(block * 8 + i) * pitch + args.unit_rows / 2] = sum[block][i + 2];
    }
  }
  if constexpr (Config::kRowTile == 8) {
    FinishFew<T>(args, tile, sums, part_floats, pitch, args.warps * 32);
  } else {
    FinishFours<T>(args, tile, sums, part_floats, pitch, args.warps * 32);
  }
#endif
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FEW_KERNEL_CUH_
