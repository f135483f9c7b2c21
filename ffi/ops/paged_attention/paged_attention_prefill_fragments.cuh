// The online softmax on scores that are spread over the lanes as the tensor cores leave them: with g = lane / 4 and
// t = lane % 4, element [m][n][i] belongs to row 16m + g + i / 2 * 8 of the warp's and to column 8n + 2t + i % 2.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_FRAGMENTS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_FRAGMENTS_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/paged_attention_prefill_common.cuh"

namespace xla_gpu {

// The softmax of a warp's kRowTiles * 16 rows, the first of which is row `first_row` of the tile.
template <int kRowTiles>
struct PrefillSoftmax {
  const int first_row;
  float largest[kRowTiles][2];     // of the scores so far, in the units of PrefillScores
  float sum[kRowTiles][2] = {};    // of this lane's columns
  float correction[kRowTiles][2];  // what the last update multiplies earlier sums with

  __device__ explicit PrefillSoftmax(int first_row) : first_row(first_row) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) largest[m][0] = largest[m][1] = -INFINITY;
  }

  static __device__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ int Row(int m, int half) const { return first_row + m * 16 + half * 8 + Lane() / 4; }

  // Scores of keys from `first_position` on become the softmax's numerators relative to the largest score so far.
  template <int kKeyTiles>
  __device__ void Update(const PrefillRows& rows, const PrefillScores& scores, int first_position,
                         float (&s)[kRowTiles][kKeyTiles][4]) {
    scores.Transform</*kExact=*/false>(s);
    if (first_position + kKeyTiles * 8 - 1 > rows.first_row_last_key || first_position < rows.last_row_first_key) {
      Mask(rows, first_position, s);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float row_largest = largest[m][h];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          row_largest = fmaxf(row_largest, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        }
        row_largest = fmaxf(row_largest, __shfl_xor_sync(~0u, row_largest, 1));
        row_largest = fmaxf(row_largest, __shfl_xor_sync(~0u, row_largest, 2));
        // A row that has seen no key so far keeps its zeros.
        const float shift = row_largest == -INFINITY ? 0.0f : row_largest * scores.to_log2;
        correction[m][h] = Exp2(largest[m][h] * scores.to_log2 - shift);
        largest[m][h] = row_largest;
        float row_sum = sum[m][h] * correction[m][h];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          s[m][n][2 * h] = Exp2(fmaf(s[m][n][2 * h], scores.to_log2, -shift));
          s[m][n][2 * h + 1] = Exp2(fmaf(s[m][n][2 * h + 1], scores.to_log2, -shift));
          row_sum += s[m][n][2 * h] + s[m][n][2 * h + 1];
        }
        sum[m][h] = row_sum;
      }
    }
  }

  // Something of all sums of the first 16 rows, to 4 bytes of this lane's in shared memory.
  __device__ void StoreSums(void* target) const {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(SharedAddress(target)), "f"(sum[0][0] + sum[0][1]) : "memory");
  }

  template <int kDimTiles>
  __device__ void Rescale(float (&o)[kRowTiles][kDimTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][d][i] *= correction[m][i / 2];
      }
    }
  }

  // Whether any row of the warp has a correction other than 1, which changes no bits.
  __device__ bool NeedsRescale() const {
    bool needed = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) needed |= correction[m][0] != 1.0f || correction[m][1] != 1.0f;
    return __any_sync(~0u, needed);
  }

  // Writes the rows and their log-sum-exp, by way of shared memory that only this warp uses: whole 16-byte chunks reach
  // `out`. `chunk(row, d)` is the place of elements [8d, 8d + 8) of a row.
  template <typename T, int kDimTiles, typename Chunk>
  __device__ void Finish(const PagedAttentionParams& params, const PrefillRows& rows, const PrefillScores& scores,
                         const float (&o)[kRowTiles][kDimTiles][4], Chunk chunk) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = Row(m, h);
        float row_sum = sum[m][h];
        row_sum += __shfl_xor_sync(~0u, row_sum, 1);
        row_sum += __shfl_xor_sync(~0u, row_sum, 2);
        const int head = row < rows.count ? rows.Head(row) : 0;
        const SoftmaxEnd end = scores.End(largest[m][h], row_sum, head);
        if (params.lse != nullptr && row < rows.count && Lane() % 4 == 0) params.lse[rows.HeadRow(row)] = end.lse;
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          const float x = end.empty ? 0.0f : o[m][d][2 * h] * end.factor;
          const float y = end.empty ? 0.0f : o[m][d][2 * h + 1] * end.factor;
          reinterpret_cast<uint32_t*>(chunk(row, d))[Lane() % 4] = Pack<T>(x, y);
        }
      }
    }
    __syncwarp();
    T* const out = static_cast<T*>(params.out);
#pragma unroll 4
    for (int i = Lane(); i < kRowTiles * 16 * kDimTiles; i += 32) {
      const int row = first_row + i / kDimTiles;
      const int d = i % kDimTiles;
      if (row >= rows.count || d * 8 >= params.head_dim) continue;
      *reinterpret_cast<uint4*>(out + rows.HeadRow(row) * params.head_dim + d * 8) =
          *reinterpret_cast<const uint4*>(chunk(row, d));
    }
  }

 private:
  template <int kKeyTiles>
  __device__ void Mask(const PrefillRows& rows, int first_position, float (&s)[kRowTiles][kKeyTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int first_key, last_key;
        rows.VisibleKeys(Row(m, h), &first_key, &last_key);
        first_key -= first_position + Lane() % 4 * 2;
        last_key -= first_position + Lane() % 4 * 2;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          if (n * 8 > last_key || n * 8 < first_key) s[m][n][2 * h] = -INFINITY;
          if (n * 8 + 1 > last_key || n * 8 + 1 < first_key) s[m][n][2 * h + 1] = -INFINITY;
        }
      }
    }
  }
};

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_PREFILL_FRAGMENTS_CUH_
