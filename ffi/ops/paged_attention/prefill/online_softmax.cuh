// The online softmax on accumulators of the tensor cores: with g = lane / 4 and t = lane % 4, element [m][n][i] is row
// 16m + g + i / 2 * 8 of the warp's rows and column 8n + 2t + i % 2. The four lanes of a quad (equal g) share a row.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ONLINE_SOFTMAX_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ONLINE_SOFTMAX_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/attention_state.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/max_of_three.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"

namespace xla_gpu::prefill {

// The softmax of a warp's kRowTiles * 16 rows, from row `first_row` of the work tile on.
// kTreeMask: rows may have a tree_mask.
// kRescaleThreshold: the maximum follows a larger score only where that exceeds it by a factor of 2^kRescaleThreshold,
// which saves most of the rescaling. Numerators up to 2^kRescaleThreshold must fit the dtype in which they multiply V.
// kMaxOfThree: maxima by instructions of three operands, which sm_90 has for integers.
template <int kRowTiles, int kRescaleThreshold = 0, bool kTreeMask = false, bool kMaxOfThree = false>
struct OnlineSoftmax {
  const int first_row;
  AttentionState state[kRowTiles][2];  // of transformed scores (LogitTransform); the sum is of this lane's columns
  float rescale[kRowTiles][2];         // the factor by which the last update multiplied earlier sums

  __device__ explicit OnlineSoftmax(int first_row) : first_row(first_row) { Reset(); }

  __device__ void Reset() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      state[m][0] = state[m][1] = {-INFINITY, 0.0f};
    }
  }

  static __device__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  // As Lane(), but opaque to the compiler. Else it computes the addresses of results before the loop over keys, where
  // registers are short.
  static __device__ int OpaqueLane() {
    int lane = Lane();
    asm volatile("" : "+r"(lane));
    return lane;
  }
  // Over the row's four lanes.
  __device__ float RowSum(int m, int half) const {
    float row_sum = state[m][half].sum;
    row_sum += __shfl_xor_sync(~0u, row_sum, 1);
    row_sum += __shfl_xor_sync(~0u, row_sum, 2);
    return row_sum;
  }
  __device__ int Row(int m, int half) const { return first_row + m * 16 + half * 8 + Lane() / 4; }

  // Turns the scores of the keys from `first_position` on into the softmax's numerators, relative to the maximum.
  template <int kKeyTiles, typename Rows>
  __device__ void Update(const Rows& rows, const LogitTransform& transform, int first_position,
                         float (&s)[kRowTiles][kKeyTiles][4]) {
    const bool mask =
        first_position + kKeyTiles * 8 - 1 > rows.first_row_last_key || first_position < rows.last_row_first_key;
    Update(rows, transform, first_position, mask, s);
  }

  // `mask`: whether some row does not see some of the keys.
  template <int kKeyTiles, typename Rows>
  __device__ void Update(const Rows& rows, const LogitTransform& transform, int first_position, bool mask,
                         float (&s)[kRowTiles][kKeyTiles][4]) {
    UpdateMax(rows, transform, first_position, mask, s);
    Exponentials<0, kKeyTiles>(transform, s);
  }

  // The first half of an update: masks the scores, and updates the states and `rescale`.
  template <int kKeyTiles, typename Rows>
  __device__ void UpdateMax(const Rows& rows, const LogitTransform& transform, int first_position, bool mask,
                            float (&s)[kRowTiles][kKeyTiles][4]) {
    transform.Transform<SoftCap::kApprox>(s);
    if (mask) Mask(rows, first_position, s);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float tile_max[2][2];  // of both rows, even and odd columns
      if constexpr (kMaxOfThree) {
        MaxOfThree(s[m], tile_max);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) tile_max[i / 2][i % 2] = s[m][0][i];
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) tile_max[i / 2][i % 2] = fmaxf(tile_max[i / 2][i % 2], s[m][n][i]);
        }
      }
      FollowMax(transform, tile_max, m);
    }
  }
  // The second half, for the key columns [8 * kFirst, 8 * kEnd).
  template <int kFirst, int kEnd, int kKeyTiles>
  __device__ void Exponentials(const LogitTransform& transform, float (&s)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const float shift[2] = {Shift(transform, state[m][0].max), Shift(transform, state[m][1].max)};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = kFirst; n < kEnd; ++n) {
          s[m][n][2 * h] = Exp2(fmaf(s[m][n][2 * h], transform.to_log2, -shift[h]));
          s[m][n][2 * h + 1] = Exp2(fmaf(s[m][n][2 * h + 1], transform.to_log2, -shift[h]));
          state[m][h].sum += s[m][n][2 * h] + s[m][n][2 * h + 1];
        }
      }
    }
  }

  // Stores a value that depends on all sums of the first 16 rows to 4 bytes of shared memory: see where it is called.
  __device__ void StoreRowSums(void* target) const {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(SharedAddress(target)), "f"(state[0][0].sum + state[0][1].sum)
                 : "memory");
  }

  template <int kDimTiles>
  __device__ void Rescale(float (&o)[kRowTiles][kDimTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][d][i] *= rescale[m][i / 2];
      }
    }
  }

  // Whether any row of the warp has a factor other than 1. Skipping the others changes no bits.
  __device__ bool NeedsRescale() const {
    bool needed = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) needed |= rescale[m][0] != 1.0f || rescale[m][1] != 1.0f;
    return __any_sync(~0u, needed);
  }

  // Writes the rows of `out` and `lse`, through shared memory that only this warp uses, so that stores are whole
  // 16-byte vectors. `vec(row, d)` is the address of elements [8d, 8d + 8) of a row.
  template <typename T, int kDimTiles, typename Rows, typename VectorAddress>
  __device__ void Store(const PagedAttentionParams& params, const Rows& rows, const LogitTransform& transform,
                        const float (&o)[kRowTiles][kDimTiles][4], VectorAddress vec) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = Row(m, h);
        const float row_sum = RowSum(m, h);
        const int head = row < rows.count ? rows.Head(row) : 0;
        const RowNormalization norm = transform.Normalize({state[m][h].max, row_sum}, head);
        if (params.lse != nullptr && row < rows.count && Lane() % 4 == 0) params.lse[rows.HeadRow(row)] = norm.lse;
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          const float x = norm.empty ? 0.0f : o[m][d][2 * h] * norm.factor;
          const float y = norm.empty ? 0.0f : o[m][d][2 * h + 1] * norm.factor;
          reinterpret_cast<uint32_t*>(vec(row, d))[Lane() % 4] = Pack<T>(x, y);
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
          *reinterpret_cast<const uint4*>(vec(row, d));
    }
  }

  // For a KV split that has a CTA of its own: stores the result to the split accumulator of the same rows of `out`,
  // whose rows begin at `first`. `invalid`: NaN.
  template <int kDimTiles, typename Rows>
  __device__ void Spill(const Rows& rows, const SplitAccumulators& accumulators, int64_t first, bool invalid,
                        const float (&o)[kRowTiles][kDimTiles][4]) const {
    const int lane = OpaqueLane();
    const int quad_lane = lane % 4;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float row_sum = RowSum(m, h);
        const int row = first_row + m * 16 + h * 8 + lane / 4;
        if (row >= rows.count) continue;
        const int64_t accum_row = first + rows.HeadRow(row);
        float2* const o_accum =
            reinterpret_cast<float2*>(accumulators.o_accum + accum_row * (kDimTiles * 8)) + quad_lane;
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) o_accum[d * 4] = make_float2(o[m][d][2 * h], o[m][d][2 * h + 1]);
        if (quad_lane == 0) {
          accumulators.max_sum_accum[accum_row] = make_float2(state[m][h].max, invalid ? CUDART_NAN_F : row_sum);
        }
      }
    }
    __syncwarp();
  }

  // For one of several KV splits that this CTA takes one after the other: merges what it has stored of the earlier ones
  // into the result (kAccumulate), and stores the result (kSpill), to the CTA's accumulator, whose rows begin at
  // `first`. Each thread reads what it, or its like in another warpgroup, has written. kShared: to shared memory.
  // NOTE: in straight lines, so that all loads are in flight at once. Row by row they took 14 µs for a work tile.
  template <bool kShared, int kDimTiles>
  __device__ void AccumulateAndSpill(const LogitTransform& transform, const SplitAccumulators& accumulators,
                                     int64_t first, SplitMode mode, bool invalid, float (&o)[kRowTiles][kDimTiles][4]) {
    const auto load = [](const auto* from) { return kShared ? *from : __ldcg(from); };
    constexpr int kAtOnce = 8;
    static_assert(kDimTiles % kAtOnce == 0);
    const int lane = OpaqueLane(), quad_lane = lane % 4;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int64_t begin = first + first_row + m * 16;
      float4* const o_accum = reinterpret_cast<float4*>(accumulators.o_accum + begin * (kDimTiles * 8)) + lane;
      float2* const max_sum = accumulators.max_sum_accum + begin + lane / 4;
      float row_sum[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[h] = invalid ? CUDART_NAN_F : RowSum(m, h);
      if ((mode & kAccumulate) != 0) {
        float4 earlier[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) earlier[i] = load(o_accum + i * 32);
        const float2 spilled[2] = {load(max_sum), load(max_sum + 8)};
        const SplitMerge merge[2] = {{{spilled[0].x, spilled[0].y}, {state[m][0].max, row_sum[0]}, transform.to_log2},
                                     {{spilled[1].x, spilled[1].y}, {state[m][1].max, row_sum[1]}, transform.to_log2}};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          state[m][h].max = merge[h].state.max;
          row_sum[h] = merge[h].state.sum;
        }
#pragma unroll
        for (int d = 0; d < kDimTiles; d += kAtOnce) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            float(&mine)[4] = o[m][d + i];
            mine[0] = merge[0].Merge(earlier[i].x, mine[0]);
            mine[1] = merge[0].Merge(earlier[i].y, mine[1]);
            mine[2] = merge[1].Merge(earlier[i].z, mine[2]);
            mine[3] = merge[1].Merge(earlier[i].w, mine[3]);
            if (d + kAtOnce < kDimTiles) earlier[i] = load(o_accum + (d + kAtOnce + i) * 32);
          }
        }
      }
      __syncwarp();  // all four lanes have read max_sum_accum
      if ((mode & kSpill) != 0) {
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          o_accum[d * 32] = make_float4(o[m][d][0], o[m][d][1], o[m][d][2], o[m][d][3]);
        }
        if (quad_lane == 0) {
          max_sum[0] = make_float2(state[m][0].max, row_sum[0]);
          max_sum[8] = make_float2(state[m][1].max, row_sum[1]);
        }
      }
      // RowSum adds the four lanes once more.
#pragma unroll
      for (int h = 0; h < 2; ++h) state[m][h].sum = quad_lane == 0 ? row_sum[h] : 0.0f;
    }
    __syncwarp();
  }

 protected:
  // Updates the states of row tile m, and `rescale`, for the largest scores of a key tile: of both rows, even and odd
  // columns.
  __device__ void FollowMax(const LogitTransform& transform, const float (&tile_max)[2][2], int m) {
    float both_columns[2] = {fmaxf(tile_max[0][0], tile_max[0][1]), fmaxf(tile_max[1][0], tile_max[1][1])};
#pragma unroll
    for (int step = 1; step <= 2; ++step) {
#pragma unroll
      for (int h = 0; h < 2; ++h) both_columns[h] = fmaxf(both_columns[h], __shfl_xor_sync(~0u, both_columns[h], step));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float all = fmaxf(state[m][h].max, both_columns[h]);
      if constexpr (kRescaleThreshold > 0) {
        // NOTE: also true of the first score after none, where the left side is infinite.
        const bool exceeds = (all - state[m][h].max) * transform.to_log2 > static_cast<float>(kRescaleThreshold);
        all = exceeds ? all : state[m][h].max;
      }
      // Exactly 1 where nothing changes: the difference of two products need not be 0.
      const float changed = Exp2(__fmaf_rn(state[m][h].max, transform.to_log2, -Shift(transform, all)));
      rescale[m][h] = all == state[m][h].max ? 1.0f : changed;
      state[m][h].max = all;
      state[m][h].sum = __fmul_rn(state[m][h].sum, rescale[m][h]);
    }
  }

  // A maximum as a base-2 logit. 0 for a row that has seen no key, so that its numerators are 0 and not NaN.
  static __device__ float Shift(const LogitTransform& transform, float max) {
    return max == -INFINITY ? 0.0f : __fmul_rn(max, transform.to_log2);
  }

 private:
  template <int kKeyTiles, typename Rows>
  __device__ void Mask(const Rows& rows, int first_position, float (&s)[kRowTiles][kKeyTiles][4]) const {
    if constexpr (kTreeMask) {
      if (rows.tree_mask != nullptr) return MaskTree(rows, first_position, s);
    }
    static_assert(kKeyTiles <= 16);  // two bits of a word each
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int first_key, last_key;
        rows.VisibleKeys(Row(m, h), &first_key, &last_key);
        const int first = first_position + Lane() % 4 * 2;
        const uint32_t seen = LaneColumnsBelow(last_key + 1 - first) & ~LaneColumnsBelow(first_key - first);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          if ((seen & 1u << 2 * n) == 0) s[m][n][2 * h] = -INFINITY;
          if ((seen & 2u << 2 * n) == 0) s[m][n][2 * h + 1] = -INFINITY;
        }
      }
    }
  }

  // With a tree_mask.
  template <int kKeyTiles, typename Rows>
  __device__ void MaskTree(const Rows& rows, int first_position, float (&s)[kRowTiles][kKeyTiles][4]) const {
    const int first = first_position + Lane() % 4 * 2;  // this lane's first key
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int first_key, last_key;
        rows.VisibleKeys(Row(m, h), &first_key, &last_key);
        first_key -= first;
        const uint64_t tokens = rows.TreeTokens(Row(m, h));
        const int first_new = rows.first_position - first;
        // A word for 32 keys, of which this lane has those with constant numbers.
#pragma unroll
        for (int base = 0; base < kKeyTiles * 8; base += 32) {
          const int shift = first_new - base;
          uint32_t seen = shift >= 32 ? ~0u : shift > 0 ? (1u << shift) - 1 : 0u;
          if (shift >= 0) {
            if (shift < 32) seen |= static_cast<uint32_t>(tokens << shift);
          } else if (shift > -64) {
            seen |= static_cast<uint32_t>(tokens >> -shift);
          }
#pragma unroll
          for (int n = base / 8; n < kKeyTiles && n < base / 8 + 4; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int key = n * 8 + i;
              if ((seen & 1u << (key - base)) == 0 || key < first_key) s[m][n][2 * h + i] = -INFINITY;
            }
          }
        }
      }
    }
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_ONLINE_SOFTMAX_CUH_
