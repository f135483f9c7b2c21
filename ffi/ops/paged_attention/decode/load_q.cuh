// The query rows of the decode kernel, as a warp holds them.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_Q_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_Q_CUH_

#include <cstdint>

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/decode/attention_state.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"
#include "ffi/ops/paged_attention/decode/traits.cuh"

namespace xla_gpu::decode {

// What lanes have of row g = lane / 4 of a row tile, for the rows 2t (i = 0) and 2t + 1 (t = lane % 4).
__device__ inline float OfRow(float value, int i) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x % 4) * 8 + 4 * i);
}

// The query rows of a row tile as B operands. Every warp has them all.
template <typename S>
struct Query {
  // Of row g (g = lane / 4) of each row tile: what products are multiplied with, for scores in units of log2 (of 1
  // under a soft cap).
  float scale[S::kFloat8 ? S::kRowTiles : 1];
  uint32_t words[S::kRowTiles][S::kSteps][2];  // of each step's 16 columns, in the order in which keys come

  // Rows past the unit's repeat its last one: nobody reads their results.
  __device__ void Load(const DecodeArgs& args, const PlanEntry& entry, const UnitPlace& unit, const Thread& thread) {
    const PagedAttentionParams& params = args.params;
    const int lane = thread.lane;
    const int head_dim = static_cast<int>(params.head_dim);
    const int last_row = entry.q_len * args.group - 1;
    float score_scale = params.scale;
    if constexpr (S::kFloat8) score_scale *= __ldg(params.k_scale + (params.scale_per_head ? unit.kv_head : 0));
    if (params.soft_cap == 0.0f) score_scale *= kLog2E;
#pragma unroll
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      const int row = min(unit.row_tile * S::kRows + 8 * tile + lane / 4, last_row);
      const int64_t at = RowPlace::Of(args, entry.q_begin, unit.kv_head, row).at * head_dim;
      // A lane's four columns of sixteen, or two of eight. head_dim is a multiple of 8.
      const int first = lane % 4 * (S::kFloat8 ? 4 : 2);
      const uint16_t* from = static_cast<const uint16_t*>(params.query) + at + first;
      asm("" : "+l"(from));  // the compiler would rather work out each address anew
      auto& of_row = words[tile];
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
        if constexpr (S::kFloat8) {
          uint2 four = {0, 0};
          if (16 * step + first < head_dim) four = __ldg(reinterpret_cast<const uint2*>(from + 16 * step));
          of_row[step][0] = four.x;
          of_row[step][1] = four.y;
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = 16 * step + 8 * i;
            of_row[step][i] = column < head_dim ? __ldg(reinterpret_cast<const uint32_t*>(from + column)) : 0;
          }
        }
      }
      scale[S::kFloat8 ? tile : 0] = score_scale;
      if constexpr (S::kFloat8) {
        if (params.dtype == DType::kBF16) scale[tile] *= ToHalf(of_row);
      }
    }
  }

  // Of row 2t + i of a row tile.
  __device__ float Scale(int tile, int i) const {
    if constexpr (!S::kFloat8) return scale[0];
    return OfRow(scale[S::kFloat8 ? tile : 0], i);
  }

 private:
  // bf16 has a wider range than float16: the row is scaled by a power of two to at most 2 in magnitude, whose inverse
  // is returned.
  __device__ static float ToHalf(uint32_t (&row)[S::kSteps][2]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kSteps * 2; ++i) {
      const float2 two = Unpack<__nv_bfloat16>(row[i / 2][i % 2]);
      largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Powers of two by their exponent bits; kept away from the ends of float32's range.
    const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 27), 227);
    const float shrink = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < S::kSteps * 2; ++i) {
      const float2 two = Unpack<__nv_bfloat16>(row[i / 2][i % 2]);
      row[i / 2][i % 2] = Pack<__half>(two.x * shrink, two.y * shrink);
    }
    return __uint_as_float(exponent << 23);
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LOAD_Q_CUH_
