// The products of int4 weights in the kernel of sm_90a that converts them.
//
// While wgmma multiplies some values of k, those behind them are converted, across groups and chunks: when the sums of
// a group are complete, the first operands of the next group are.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_INT4_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_INT4_CUH_

#include <cstdint>

#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/device/wgmma.cuh"
#include "ffi/device/wgmma_narrow.cuh"
#include "ffi/ops/linear/sm90_converted_traits.cuh"
#include "ffi/ops/linear/sm90_converted_weights.cuh"
#include "ffi/ops/linear/sm90_int4_weights.cuh"

namespace xla_gpu::linear {

// A lane's weights, as operands of wgmma, with their scales: those of one chunk at a time, chunks follow one another.
template <typename Config>
class ConvertedInt4 {
 public:
  using T = typename Config::T;
  static constexpr int kSteps = Config::kStepsAtOnce;

  __device__ __forceinline__ ConvertedInt4(const Sm90Args& args, int tile, int chunk_begin, int chunk_end,
                                           const char* shared, ConvertedBarriers<Config> barriers)
      : args_(args),
        t_(static_cast<int>(threadIdx.x) % 4),
        row_(RowOfLanes(static_cast<int>(threadIdx.x) % 32 / 4)),
        loader_(args.linear, FirstRowOfQuarter<Config>(args.linear, tile, Warp() / 4) + Warp() % 4 * 16 + row_),
        chunk_begin_(chunk_begin),
        chunk_end_(chunk_end),
        rows_(shared + (Warp() * 16 + row_) * 128),
        barriers_(barriers),
        magic_(ConversionMagic<T, WeightFormat::kInt4>()) {
    loader_.Load(args.linear, chunk_begin * 2 + 2 * t_, &next_groups_);
  }

  // Waits for a chunk's weights.
  __device__ __forceinline__ void Begin(int chunk) {
    // Of scales and zero points, loaded ahead: of 8 groups, two of them by each lane of four.
    constexpr int kChunksOfLoad = 4;
    const int chunk_of_load = (chunk - chunk_begin_) % kChunksOfLoad;
    if (chunk_of_load == 0) {
      groups_ = next_groups_;
      groups_.zero_points[0] |= groups_.zero_points[1] << 16;
      if (chunk + kChunksOfLoad < chunk_end_) {
        loader_.Load(args_.linear, (chunk + kChunksOfLoad) * 2 + 2 * t_, &next_groups_);
      }
    }
    scale_[0] = __shfl_sync(~0u, groups_.scale[0], chunk_of_load, 4);
    scale_[1] = __shfl_sync(~0u, groups_.scale[1], chunk_of_load, 4);
    zero_points_ = __shfl_sync(~0u, groups_.zero_points[0], chunk_of_load, 4);
    WaitBarrier(barriers_.WeightFull(ring_.stage), ring_.phase);
    from_ = rows_ + ring_.stage * Config::kWeightStageBytes;
    if constexpr (Config::kLoadsStage) {
#pragma unroll
      for (int panel = 0; panel < 4; ++panel) LoadPanel(panel);
    }
  }

  // What the sums of a group of the chunk are multiplied by, of rows r and r + 8.
  __device__ __forceinline__ void Factors(int group, float (&factor)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 pair = Unpack<T>(scale_[r]);
      factor[r] = (group == 0 ? pair.x : pair.y) * kInt4Unit<T>;
    }
  }

  // Operands of kSteps steps of a group of the chunk, parts following one another.
  __device__ __forceinline__ void Convert(int group, int part, uint32_t (&to)[kSteps][4]) {
    const int first_step = part * kSteps, panel = group * 2 + first_step / 4;
    if (part == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) offsets_[r] = OffsetsOf<T>(zero_points_, 2 * r + group);
    }
    if (!Config::kLoadsStage && first_step % 4 == 0) LoadPanel(panel);
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t values[4];
        ConvertInt4Word<T>(raw_[r][panel][(first_step + i) % 4 / 2], offsets_[r], magic_, values);
        to[i][r] = values[0], to[i][r + 2] = values[1];
        to[i + 1][r] = values[2], to[i + 1][r + 2] = values[3];
      }
    }
  }

  // Gives the chunk's stage back, when products of all its weights have been started.
  __device__ __forceinline__ void End() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ArriveBarrier(barriers_.WeightEmpty(ring_.stage));
    ring_.Advance(Config::kWeightStages);
  }

 private:
  __device__ static int Warp() { return static_cast<int>(threadIdx.x) / 32; }

  __device__ __forceinline__ void LoadPanel(int panel) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* const at = from_ + r * 1024 + (((2 * panel + t_ / 2) ^ row_) << 4) + t_ % 2 * 8;
      const uint2 two = *reinterpret_cast<const uint2*>(at);
      raw_[r][panel][0] = two.x, raw_[r][panel][1] = two.y;
    }
  }

  const Sm90Args& args_;
  const int t_, row_;
  const GroupLoader<T, WeightFormat::kInt4> loader_;
  const int chunk_begin_, chunk_end_;
  const char* const rows_;
  const ConvertedBarriers<Config> barriers_;
  const uint32_t magic_;
  RowGroups<T, WeightFormat::kInt4> groups_, next_groups_;
  PipelineState ring_;
  const char* from_ = nullptr;
  uint32_t scale_[2], zero_points_, raw_[2][4][2];
  Int4Offsets offsets_[2];
};

// The products of a CTA's work tile and part of k. `shared`: the weight stages.
template <typename Config>
__device__ __forceinline__ void MultiplyConvertedInt4(const Sm90Args& args, int tile, int chunk_begin, int chunk_end,
                                                      const char* shared, uint32_t xs,
                                                      ConvertedBarriers<Config> barriers,
                                                      float (&result)[Config::kRowTile / 8][4]) {
  using T = typename Config::T;
  constexpr int kRowBlocks = Config::kRowTile / 8, kSteps = Config::kStepsAtOnce, kParts = 8 / kSteps;
  ConvertedInt4<Config> weights(args, tile, chunk_begin, chunk_end, shared, barriers);
#pragma unroll
  for (auto& block : result) block[0] = block[1] = block[2] = block[3] = 0.0f;
  float sum[kRowBlocks][4];
  uint32_t a[2][kSteps][4];
  PipelineState x_ring;
  if (chunk_begin < chunk_end) {
    weights.Begin(chunk_begin);
    weights.Convert(0, 0, a[0]);
  }
  for (int chunk = chunk_begin; chunk < chunk_end; ++chunk) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      float factor[2];
      weights.Factors(group, factor);
      WaitBarrier(barriers.XReady(x_ring.stage), x_ring.phase);
      __syncwarp();
      // The same in all lanes: the compiler then keeps descriptors in uniform registers.
      const uint32_t x = __shfl_sync(~0u, xs + x_ring.stage * Config::kXStageBytes, 0);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int first_step = part * kSteps;
        WgmmaFence();
        const uint64_t b = MakeSmemDescKMajor(x + first_step / 4 * (Config::kXStageBytes / 2));
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          WgmmaNarrow<T>(sum, a[part % 2][i], AdvanceSmemDesc(b, (first_step + i) % 4 * 32), first_step + i > 0);
        }
        WgmmaCommit();
        if (group == 1 && part == kParts - 1) weights.End();
        if (part > 0) WgmmaWait<1>();  // the products before these have read their operand
        if (part + 1 < kParts) {
          weights.Convert(group, part + 1, a[(part + 1) % 2]);
        } else if (group == 0) {
          weights.Convert(1, 0, a[0]);
        } else if (chunk + 1 < chunk_end) {
          weights.Begin(chunk + 1);
          weights.Convert(0, 0, a[0]);
        }
      }
      WgmmaWait<0>();
      WgmmaFenceOperand(sum);
      if (threadIdx.x % 32 == 0) ArriveBarrier(barriers.XEmpty(x_ring.stage));
      x_ring.Advance(Config::kXStages);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) result[r][i] = fmaf(factor[i / 2], sum[r][i], result[r][i]);
      }
    }
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_INT4_CUH_
