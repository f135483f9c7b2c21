// The online softmax on scores that are spread over the lanes as the tensor cores leave them: with g = lane / 4 and
// t = lane % 4, element [m][n][i] belongs to row 16m + g + i / 2 * 8 of the warp's and to column 8n + 2t + i % 2.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ONLINE_SOFTMAX_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ONLINE_SOFTMAX_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"

namespace xla_gpu {

// The softmax of a warp's kRowTiles * 16 rows, the first of which is row `first_row` of the tile.
// kSlack: numerators are relative to an earlier largest score until a later one exceeds it by a factor of 2^kSlack. It
// saves most of the rescaling; numerators up to 2^kSlack must fit the dtype of their product with V.
template <int kRowTiles, int kSlack = 0>
struct PrefillSoftmax {
  const int first_row;
  float largest[kRowTiles][2];     // of the scores so far (see kSlack), in the units of PrefillScores
  float sum[kRowTiles][2];         // of this lane's columns
  float correction[kRowTiles][2];  // what the last update multiplies earlier sums with

  __device__ explicit PrefillSoftmax(int first_row) : first_row(first_row) { Reset(); }

  __device__ void Reset() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      largest[m][0] = largest[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0.0f;
    }
  }

  static __device__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  // Of which the compiler does not know that it never changes: it would else work out addresses of results before the
  // loop over keys, where registers are short.
  static __device__ int OpaqueLane() {
    int lane = Lane();
    asm volatile("" : "+r"(lane));
    return lane;
  }
  // Of all four lanes that have parts of a row.
  __device__ float RowSum(int m, int half) const {
    float row_sum = sum[m][half];
    row_sum += __shfl_xor_sync(~0u, row_sum, 1);
    row_sum += __shfl_xor_sync(~0u, row_sum, 2);
    return row_sum;
  }
  __device__ int Row(int m, int half) const { return first_row + m * 16 + half * 8 + Lane() / 4; }

  // Scores of keys from `first_position` on become the softmax's numerators relative to the largest score so far.
  template <int kKeyTiles, typename Rows>
  __device__ void Update(const Rows& rows, const PrefillScores& scores, int first_position,
                         float (&s)[kRowTiles][kKeyTiles][4]) {
    const bool mask =
        first_position + kKeyTiles * 8 - 1 > rows.first_row_last_key || first_position < rows.last_row_first_key;
    Update(rows, scores, first_position, mask, s);
  }

  // `mask`: whether some row does not see all of the keys.
  template <int kKeyTiles, typename Rows>
  __device__ void Update(const Rows& rows, const PrefillScores& scores, int first_position, bool mask,
                         float (&s)[kRowTiles][kKeyTiles][4]) {
    Begin(rows, scores, first_position, mask, s);
    Exponentials<0, kKeyTiles>(scores, s);
  }

  // The first part of an update: masks, and the largest scores.
  template <int kKeyTiles, typename Rows>
  __device__ void Begin(const Rows& rows, const PrefillScores& scores, int first_position, bool mask,
                        float (&s)[kRowTiles][kKeyTiles][4]) {
    scores.Transform</*kExact=*/false>(s);
    if (mask) Mask(rows, first_position, s);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float row_largest[2][2];  // of both rows, even and odd columns
#pragma unroll
      for (int i = 0; i < 4; ++i) row_largest[i / 2][i % 2] = s[m][0][i];
#pragma unroll
      for (int n = 1; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) row_largest[i / 2][i % 2] = fmaxf(row_largest[i / 2][i % 2], s[m][n][i]);
      }
      float together[2] = {fmaxf(row_largest[0][0], row_largest[0][1]), fmaxf(row_largest[1][0], row_largest[1][1])};
#pragma unroll
      for (int step = 1; step <= 2; ++step) {
#pragma unroll
        for (int h = 0; h < 2; ++h) together[h] = fmaxf(together[h], __shfl_xor_sync(~0u, together[h], step));
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float all = fmaxf(largest[m][h], together[h]);
        if constexpr (kSlack > 0) {
          // NOTE: also true of the first score after none, where the left side is infinite.
          const bool exceeds = (all - largest[m][h]) * scores.to_log2 > static_cast<float>(kSlack);
          all = exceeds ? all : largest[m][h];
        }
        // Exactly 1 where nothing changes: the difference of two products need not be 0.
        const float changed = Exp2(__fmaf_rn(largest[m][h], scores.to_log2, -Shift(scores, all)));
        correction[m][h] = all == largest[m][h] ? 1.0f : changed;
        largest[m][h] = all;
        sum[m][h] = __fmul_rn(sum[m][h], correction[m][h]);
      }
    }
  }

  // The second part, of the key tiles [kFirst, kEnd).
  template <int kFirst, int kEnd, int kKeyTiles>
  __device__ void Exponentials(const PrefillScores& scores, float (&s)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const float shift[2] = {Shift(scores, largest[m][0]), Shift(scores, largest[m][1])};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = kFirst; n < kEnd; ++n) {
          s[m][n][2 * h] = Exp2(fmaf(s[m][n][2 * h], scores.to_log2, -shift[h]));
          s[m][n][2 * h + 1] = Exp2(fmaf(s[m][n][2 * h + 1], scores.to_log2, -shift[h]));
          sum[m][h] += s[m][n][2 * h] + s[m][n][2 * h + 1];
        }
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
  template <typename T, int kDimTiles, typename Rows, typename Chunk>
  __device__ void Finish(const PagedAttentionParams& params, const Rows& rows, const PrefillScores& scores,
                         const float (&o)[kRowTiles][kDimTiles][4], Chunk chunk) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = Row(m, h);
        const float row_sum = RowSum(m, h);
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

  // For parts of a tile's keys: adds what lies in the scratch to the results so far, and leaves them there, as `mode`
  // says. The rows there begin at `first`, and are this tile's, or with kPartApart all of out's. `wrong`: NaN.
  template <int kDimTiles, typename Rows>
  __device__ void FoldPart(const Rows& rows, const PrefillScores& scores, const PrefillPartials& partials,
                           int64_t first, PrefillPartMode mode, bool wrong, float (&o)[kRowTiles][kDimTiles][4]) {
    const int lane = OpaqueLane();
    const int part = lane % 4;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float row_sum = RowSum(m, h);
        if (wrong) row_sum = CUDART_NAN_F;
        const int row = first_row + m * 16 + h * 8 + lane / 4;
        const bool in_tile = row < rows.count;
        const int64_t place = in_tile ? first + ((mode & kPartApart) != 0 ? rows.HeadRow(row) : row) : 0;
        float2* const values = reinterpret_cast<float2*>(partials.values + place * (kDimTiles * 8)) + part;
        if (in_tile && (mode & kFoldPart) != 0) {
          const PrefillFold both(__ldcg(partials.sums + place), make_float2(largest[m][h], row_sum), scores.to_log2);
          largest[m][h] = both.sums.x;
          row_sum = both.sums.y;
#pragma unroll
          for (int d = 0; d < kDimTiles; ++d) {
            const float2 before = __ldcg(values + d * 4);
            o[m][d][2 * h] = both.Of(before.x, o[m][d][2 * h]);
            o[m][d][2 * h + 1] = both.Of(before.y, o[m][d][2 * h + 1]);
          }
        }
        __syncwarp();  // all four lanes have read the sums
        if (in_tile && (mode & kKeepPart) != 0) {
#pragma unroll
          for (int d = 0; d < kDimTiles; ++d) values[d * 4] = make_float2(o[m][d][2 * h], o[m][d][2 * h + 1]);
          if (part == 0) partials.sums[place] = make_float2(largest[m][h], row_sum);
        }
        // The four lanes' sums are added up once more.
        sum[m][h] = part == 0 ? row_sum : 0.0f;
      }
    }
    __syncwarp();
  }

  // As Finish, straight from registers: four lanes exchange their parts of four chunks of a row, so that each has a
  // whole one. `wrong`: NaN instead.
  template <typename T, int kDimTiles, typename Rows>
  __device__ void FinishInRegisters(const PagedAttentionParams& params, const Rows& rows, const PrefillScores& scores,
                                    const float (&o)[kRowTiles][kDimTiles][4], bool wrong) const {
    static_assert(kDimTiles % 4 == 0);
    const int lane = OpaqueLane();
    const int part = lane % 4;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + m * 16 + h * 8 + lane / 4;
        const bool in_tile = row < rows.count;
        const float row_sum = RowSum(m, h);
        const unsigned packed = rows.first + row;
        const unsigned token = rows.group.Divide(packed);
        const unsigned group = rows.group.divisor;
        const int head = static_cast<int>(rows.kv_head * group + (packed - token * group));
        SoftmaxEnd end = scores.EndFast(largest[m][h], row_sum, in_tile ? head : 0);
        if (wrong) end = {false, CUDART_NAN_F, CUDART_NAN_F};
        const int64_t head_row = in_tile ? (rows.q_begin + token) * static_cast<unsigned>(rows.num_heads) + head : 0;
        if (params.lse != nullptr && in_tile && part == 0) params.lse[head_row] = end.lse;
        T* const out = static_cast<T*>(params.out) + head_row * params.head_dim;
#pragma unroll
        for (int d = 0; d < kDimTiles; d += 4) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            // NOTE: sums of rows that see no key are 0.
            x[i] = Pack<T>(o[m][d + i][2 * h] * end.factor, o[m][d + i][2 * h + 1] * end.factor);
          }
          const bool odd = part % 2 != 0;
          const uint32_t from1[2] = {__shfl_xor_sync(~0u, odd ? x[0] : x[1], 1),
                                     __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1)};
          // Of two chunks, this lane's and the next lane's parts.
          const uint2 low_chunk = odd ? make_uint2(from1[0], x[1]) : make_uint2(x[0], from1[0]);
          const uint2 high_chunk = odd ? make_uint2(from1[1], x[3]) : make_uint2(x[2], from1[1]);
          const bool upper = part >= 2;
          const uint2 sent = upper ? low_chunk : high_chunk;
          const uint2 got = make_uint2(__shfl_xor_sync(~0u, sent.x, 2), __shfl_xor_sync(~0u, sent.y, 2));
          const uint4 chunk = upper ? make_uint4(got.x, got.y, high_chunk.x, high_chunk.y)
                                    : make_uint4(low_chunk.x, low_chunk.y, got.x, got.y);
          const int column = (d + part) * 8;
          if (in_tile && column < params.head_dim) *reinterpret_cast<uint4*>(out + column) = chunk;
        }
      }
    }
  }

 private:
  // What numerators are relative to, in base 2. A row that has seen no key so far keeps its zeros.
  static __device__ float Shift(const PrefillScores& scores, float row_largest) {
    return row_largest == -INFINITY ? 0.0f : __fmul_rn(row_largest, scores.to_log2);
  }

  template <int kKeyTiles, typename Rows>
  __device__ void Mask(const Rows& rows, int first_position, float (&s)[kRowTiles][kKeyTiles][4]) const {
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

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ONLINE_SOFTMAX_CUH_
