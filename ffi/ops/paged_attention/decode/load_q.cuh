// The query rows of a work tile, in the registers of every warp.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_Q_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_Q_CUH_

#include <cstdint>

#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/decode/output_rows.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"
#include "ffi/ops/paged_attention/decode/traits.cuh"

namespace xla_gpu::decode {

// With g = lane / 4 and t = lane % 4: from a value that lanes have for row g of a row tile, the one of row 2t + i.
__device__ inline float FromRow(float value, int i) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x % 4) * 8 + 4 * i);
}

// The query rows as B operands of Q * K^T.
template <typename Traits>
struct QueryFragment {
  // What the products of row g of each row tile are multiplied with. Scores are then in units of log2, or of 1 under a
  // soft cap.
  float scale[Traits::kFloat8 ? Traits::kRowTiles : 1];
  uint32_t words[Traits::kRowTiles][Traits::kQkSteps][2];  // columns in the order in which K comes

  // Rows past the work tile's last one repeat it: their results are not used.
  __device__ void Load(const DecodeArgs& args, const SequencePlan& plan, const WorkTile& work_tile,
                       const Thread& thread) {
    const PagedAttentionParams& params = args.params;
    const int lane = thread.lane;
    const int head_dim = static_cast<int>(params.head_dim);
    const int last_row = plan.q_len * args.group_size - 1;
    static_assert(!Traits::kFloat8 || !Traits::kDependent);
    float score_scale = params.scale;
    if constexpr (Traits::kFloat8) {
      score_scale *= __ldg(params.k_scale + (params.scale_per_head ? work_tile.kv_head : 0));
    }
    if (params.soft_cap == 0.0f) score_scale *= kLog2E;
#pragma unroll
    for (int tile = 0; tile < Traits::kRowTiles; ++tile) {
      const int row = min(work_tile.row_tile * Traits::kRows + 8 * tile + lane / 4, last_row);
      const int64_t row_offset = RowIndex::Of(args, plan.q_begin, work_tile.kv_head, row).index * head_dim;
      // A lane has four neighbouring columns of sixteen, or two of eight. head_dim is a multiple of 8.
      const int first = lane % 4 * (Traits::kFloat8 ? 4 : 2);
      const uint16_t* from = static_cast<const uint16_t*>(params.query) + row_offset + first;
      asm("" : "+l"(from));  // keeps the compiler from computing each address anew
      auto& row_words = words[tile];
#pragma unroll
      for (int step = 0; step < Traits::kQkSteps; ++step) {
        if constexpr (Traits::kFloat8) {
          uint2 four = {0, 0};
          if (16 * step + first < head_dim) four = __ldg(reinterpret_cast<const uint2*>(from + 16 * step));
          row_words[step][0] = four.x;
          row_words[step][1] = four.y;
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = 16 * step + 8 * i;
            row_words[step][i] = column < head_dim ? LoadTwo(from + column) : 0;
          }
        }
      }
      scale[Traits::kFloat8 ? tile : 0] = score_scale;
      if constexpr (Traits::kFloat8) {
        if (params.dtype == DType::kBF16) scale[tile] *= ConvertToHalf(row_words);
      }
    }
  }

  // The scale of row 2t + i of a row tile.
  __device__ float Scale(int tile, int i) const {
    if constexpr (!Traits::kFloat8) return scale[0];
    return FromRow(scale[Traits::kFloat8 ? tile : 0], i);
  }

 private:
  __device__ static uint32_t LoadTwo(const uint16_t* from) {
    if constexpr (Traits::kDependent) return LoadBehindWait(reinterpret_cast<const int32_t*>(from));
    return __ldg(reinterpret_cast<const uint32_t*>(from));
  }

  // Converts a row from bfloat16, whose range is wider, to float16: the row is divided by a power of two, which is
  // returned, so that its magnitudes are at most 2.
  __device__ static float ConvertToHalf(uint32_t (&row)[Traits::kQkSteps][2]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < Traits::kQkSteps * 2; ++i) {
      const float2 two = Unpack<__nv_bfloat16>(row[i / 2][i % 2]);
      largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Powers of two by their exponent bits, clamped to stay away from the ends of float32's range.
    const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 27), 227);
    const float shrink = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < Traits::kQkSteps * 2; ++i) {
      const float2 two = Unpack<__nv_bfloat16>(row[i / 2][i % 2]);
      row[i / 2][i % 2] = Pack<__half>(two.x * shrink, two.y * shrink);
    }
    return __uint_as_float(exponent << 23);
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_Q_CUH_
