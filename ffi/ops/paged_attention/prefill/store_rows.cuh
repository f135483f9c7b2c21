// Writes the results of a warp's rows from the accumulators of the tensor cores.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_STORE_ROWS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_STORE_ROWS_CUH_

#include <cstdint>

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/prefill/online_softmax.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"

namespace xla_gpu::prefill {

// Writes the rows of `out` and `lse`, as OnlineSoftmax::Store, without shared memory: a quad's lanes exchange their
// elements of four 16-byte vectors of a row, so that each has a whole one. `softmax`: an OnlineSoftmax. `invalid`: NaN
// instead.
template <typename T, int kRowTiles, int kDimTiles, typename Softmax, typename Rows>
__device__ void StoreVectors(const Softmax& softmax, const PagedAttentionParams& params, const Rows& rows,
                             const LogitTransform& transform, const float (&o)[kRowTiles][kDimTiles][4], bool invalid) {
  static_assert(kDimTiles % 4 == 0);
  const int lane = Softmax::OpaqueLane();
  const int quad_lane = lane % 4;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = softmax.first_row + m * 16 + h * 8 + lane / 4;
      const bool in_tile = row < rows.count;
      const float row_sum = softmax.RowSum(m, h);
      const unsigned packed = rows.first + row;
      const unsigned token = rows.group.Divide(packed);
      const unsigned group = rows.group.divisor;
      const int head = static_cast<int>(rows.kv_head * group + (packed - token * group));
      RowNormalization norm = transform.NormalizeFast({softmax.state[m][h].max, row_sum}, in_tile ? head : 0);
      if (invalid) norm = {false, CUDART_NAN_F, CUDART_NAN_F};
      const int64_t head_row = in_tile ? (rows.q_begin + token) * static_cast<unsigned>(rows.num_heads) + head : 0;
      if (params.lse != nullptr && in_tile && quad_lane == 0) params.lse[head_row] = norm.lse;
      T* const out = static_cast<T*>(params.out) + head_row * params.head_dim;
#pragma unroll
      for (int d = 0; d < kDimTiles; d += 4) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // NOTE: o of a row that sees no key is 0.
          x[i] = Pack<T>(o[m][d + i][2 * h] * norm.factor, o[m][d + i][2 * h + 1] * norm.factor);
        }
        const bool odd = quad_lane % 2 != 0;
        const uint32_t from1[2] = {__shfl_xor_sync(~0u, odd ? x[0] : x[1], 1),
                                   __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1)};
        // Of two vectors: this lane's and its neighbour's elements.
        const uint2 low_vec = odd ? make_uint2(from1[0], x[1]) : make_uint2(x[0], from1[0]);
        const uint2 high_vec = odd ? make_uint2(from1[1], x[3]) : make_uint2(x[2], from1[1]);
        const bool upper = quad_lane >= 2;
        const uint2 sent = upper ? low_vec : high_vec;
        const uint2 got = make_uint2(__shfl_xor_sync(~0u, sent.x, 2), __shfl_xor_sync(~0u, sent.y, 2));
        const uint4 vec =
            upper ? make_uint4(got.x, got.y, high_vec.x, high_vec.y) : make_uint4(low_vec.x, low_vec.y, got.x, got.y);
        const int column = (d + quad_lane) * 8;
        if (in_tile && column < params.head_dim) *reinterpret_cast<uint4*>(out + column) = vec;
      }
    }
  }
}

// As StoreVectors of 16 rows, where head_dim is kDimTiles * 8, in vectors of 8 bytes, of which a quad's lanes write a
// whole sector of a row: with half of the exchanges, it is half as many instructions.
template <typename T, int kDimTiles, typename Softmax, typename Rows>
__device__ void StoreSectors(const Softmax& softmax, const PagedAttentionParams& params, const Rows& rows,
                             const LogitTransform& transform, const float (&o)[1][kDimTiles][4], bool invalid) {
  static_assert(kDimTiles % 2 == 0);
  const int lane = Softmax::OpaqueLane();
  const int quad_lane = lane % 4;
  const bool odd = quad_lane % 2 != 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = softmax.first_row + h * 8 + lane / 4;
    const bool in_tile = row < rows.count;
    const float row_sum = softmax.RowSum(0, h);
    const unsigned packed = rows.first + row;
    const unsigned token = rows.group.Divide(packed);
    const unsigned head = rows.kv_head * rows.group.divisor + (packed - token * rows.group.divisor);
    RowNormalization norm =
        transform.NormalizeFast({softmax.state[0][h].max, row_sum}, in_tile ? static_cast<int>(head) : 0);
    if (invalid) norm = {false, CUDART_NAN_F, CUDART_NAN_F};
    const int64_t head_row = in_tile ? (rows.q_begin + token) * static_cast<unsigned>(rows.num_heads) + head : 0;
    if (params.lse != nullptr && in_tile && quad_lane == 0) params.lse[head_row] = norm.lse;
    T* const out = static_cast<T*>(params.out) + head_row * (kDimTiles * 8) + (odd ? 8 : 0) + quad_lane / 2 * 4;
#pragma unroll
    for (int d = 0; d < kDimTiles; d += 2) {
      // NOTE: o of a row that sees no key is 0.
      const uint32_t low = Pack<T>(o[0][d][2 * h] * norm.factor, o[0][d][2 * h + 1] * norm.factor);
      const uint32_t high = Pack<T>(o[0][d + 1][2 * h] * norm.factor, o[0][d + 1][2 * h + 1] * norm.factor);
      const uint32_t got = __shfl_xor_sync(~0u, odd ? low : high, 1);
      const uint2 vec = odd ? make_uint2(got, high) : make_uint2(low, got);
      if (in_tile) *reinterpret_cast<uint2*>(out + d * 8) = vec;
    }
  }
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_STORE_ROWS_CUH_
