// What the consumer warpgroups of the sm_90a kernel for few rows (sm90_few_rows.cuh) do at the end of a work tile: they
// exchange halves of their accumulators, merge them, and store rows of the result or a part of them.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_RESULTS_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_RESULTS_CUH_

#include <math_constants.h>

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/mla_attention/sm90_few_rows_traits.cuh"

namespace xla_gpu::mla {

template <typename T>
class FewRowsResults {
 public:
  using Accumulators = FewRowsAccumulators;
  using Rows = FewRowsOfThread;

  __device__ FewRowsResults(const FewRowsCta& cta, const FewRowsThread& at) : cta_(cta), params_(cta.params), at_(at) {}

  // Merges both warpgroups' results and stores those of column tiles [kOwnDimTiles * warpgroup, + kOwnDimTiles).
  __device__ void Store(const WorkTile& tile, bool wrong, const Rows& max, const Rows& sum,
                        const Accumulators& o) const {
    Rows mine, others;  // what the accumulators are to be multiplied by
    StoreStates(tile, wrong, max, sum, mine, others);
    auto& exchange = cta_.Storage().exchange;
#pragma unroll
    for (int m = 0; m < kOwnDimTiles; ++m) {
#pragma unroll
      for (int first = 0; first < kBlocks; first += 2) {
        // What the other warpgroup wrote before has been read.
        if (m + first > 0) NamedBarrierSync(kExchangeBarrier, kConsumerThreads);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float(&low)[4] = o[m][first + i];
          const float(&high)[4] = o[m + kOwnDimTiles][first + i];
          exchange[at_.warpgroup][i][at_.thread] = at_.warpgroup == 0 ? make_float4(high[0], high[1], high[2], high[3])
                                                                      : make_float4(low[0], low[1], low[2], low[3]);
        }
        NamedBarrierSync(kExchangeBarrier, kConsumerThreads);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int n = first + i;
          const float4 vec = exchange[1 - at_.warpgroup][i][at_.thread];
          const float got[4] = {vec.x, vec.y, vec.z, vec.w};
          float merged[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float own = at_.warpgroup == 0 ? o[m][n][e] : o[m + kOwnDimTiles][n][e];
            merged[e] = own * mine[n][e % 2] + got[e] * others[n][e % 2];
          }
          const int column = at_.warpgroup * kHalfDim + m * 64 + at_.warp * 16;
          if (tile.slot < 0) {
            StoreRows(tile, n, column, merged);
          } else {
            StorePart(tile, n, column, merged);
          }
        }
      }
    }
  }

 private:
  static constexpr int kBlocks = FewRowsTraits::kBlocks;
  static constexpr int kOwnDimTiles = FewRowsTraits::kOwnDimTiles;
  static constexpr int kExchangeBarrier = FewRowsTraits::kExchangeBarrier;

  const FewRowsCta& cta_;
  const Sm90Params& params_;
  const FewRowsThread& at_;

  // Merges and stores the states of the rows, or what follows from them. Contains a barrier of both warpgroups.
  __device__ void StoreStates(const WorkTile& tile, bool wrong, const Rows& max, const Rows& sum, Rows& mine,
                              Rows& others) const {
    auto& storage = cta_.Storage();
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float sums[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sums[j] = sum[n][j];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], step);
      }
      if (at_.group == 0) {
        const int row = n * 8 + at_.column;
        *reinterpret_cast<float2*>(&storage.warp_sums[at_.warpgroup][at_.warp][row]) = make_float2(sums[0], sums[1]);
        if (at_.warp == 0) {
          *reinterpret_cast<float2*>(&storage.row_max[at_.warpgroup][row]) = make_float2(max[n][0], max[n][1]);
        }
      }
    }
    NamedBarrierSync(kExchangeBarrier, kConsumerThreads);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = n * 8 + at_.column + j;
        const auto state_of = [&](int warpgroup) {
          const float(&sums)[4][kFewRows] = storage.warp_sums[warpgroup];
          return AttentionState{storage.row_max[warpgroup][row],
                                (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row])};
        };
        AttentionState state = state_of(0);
        const MergeWeights weights = state.Merge(state_of(1));
        if (wrong) state.sum = CUDART_NAN_F;
        const bool stores = row < tile.rows && at_.warpgroup == 0 && at_.warp == 0 && at_.group == 0;
        float factor = 1.0f;
        if (tile.slot < 0) {
          factor = state.sum == 0.0f ? 0.0f : state.Normalize(1.0f);
          if (stores && params_.attention.lse != nullptr) {
            params_.attention.lse[tile.first_row + row] = state.LogSumExp();
          }
        } else if (stores) {
          params_.states[static_cast<int64_t>(tile.slot) * params_.slot_rows + row] = state;
        }
        mine[n][j] = (at_.warpgroup == 0 ? weights.first : weights.second) * factor;
        others[n][j] = (at_.warpgroup == 0 ? weights.second : weights.first) * factor;
      }
    }
  }

  // The rows of block n, 16 columns of each warp. In vectors of 8 bytes, of which the four lanes of a row write a whole
  // sector.
  __device__ void StoreRows(const WorkTile& tile, int n, int column, const float (&c)[4]) const {
    const int quad_lane = cta_.lane % 4;
    const bool odd = quad_lane % 2 != 0;
    const uint32_t low = Transpose(Pack<T>(c[0], c[1])), high = Transpose(Pack<T>(c[2], c[3]));
    const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
    const uint2 vec = odd ? make_uint2(got, high) : make_uint2(low, got);
    const int row = n * 8 + at_.group;  // transposed
    if (row >= tile.rows) return;
    T* const out = static_cast<T*>(params_.attention.out) + (int64_t{tile.first_row} + row) * kLatentDim + column;
    *reinterpret_cast<uint2*>(out + (odd ? 8 : 0) + quad_lane / 2 * 4) = vec;
  }
  // A matrix of 8 rows, which lane / 4 counts, of 8 elements, in pairs.
  static __device__ uint32_t Transpose(uint32_t pair) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
  }

  // The same of accumulators. Eight lanes write a whole sector.
  __device__ void StorePart(const WorkTile& tile, int n, int column, const float (&c)[4]) const {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = n * 8 + at_.column + j;
      if (row >= tile.rows) continue;
      const int64_t part_row = static_cast<int64_t>(tile.slot) * params_.slot_rows + row;
      float* const accumulator = params_.accumulators + part_row * kLatentDim + column + at_.group;
      accumulator[0] = c[j];
      accumulator[8] = c[2 + j];
    }
  }
};

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_FEW_ROWS_RESULTS_CUH_
