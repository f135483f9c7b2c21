// One iteration of the split-KV kernel's mainloop, as one warp computes it: the scores of its own KV tile, which it
// stores in shared memory, and, with the scores of all four warps, its own columns of the output over the whole block.
//
// S^T = K * Q^T in tiles of 16 keys by 8 rows, O^T += V^T * P^T in tiles of 16 columns by 16 keys by 8 rows. Scores
// pass through shared memory, which brings them to the lanes that need them as weights. float8 is converted to float16
// in registers. The sum over columns then runs in the order in which a lane gets them: four neighbouring bytes of a
// key, and two of each of two values.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_MAINLOOP_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_MAINLOOP_CUH_

#include <cstdint>

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/decode/attention_state.cuh"
#include "ffi/ops/paged_attention/decode/load_kv.cuh"
#include "ffi/ops/paged_attention/decode/load_q.cuh"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"
#include "ffi/ops/paged_attention/decode/traits.cuh"

namespace xla_gpu::decode {

// ---- Addresses for ldmatrix
// --------------------------------------------------------------------------------------------

// Two vectors of 16 rows of a KV tile are four matrices of eight rows and a vector. A lane gives the address of a row
// of one of them. Of K the order is both halves of the rows, then the other vector; of V both vectors, then the other
// half.
template <typename Traits>
__device__ inline uint32_t MatrixOffset(int lane, int half, int vector) {
  const int row = half * 8 + lane % 8;
  return row * Traits::kRowBytes + (vector ^ Traits::Swizzle(row)) * 16;
}
template <typename Traits>
__device__ inline uint32_t KOffset(int lane) {
  const int matrix = lane / 8;
  return MatrixOffset<Traits>(lane, matrix % 2, matrix / 2);
}
template <typename Traits>
__device__ inline uint32_t VOffset(int lane) {
  const int matrix = lane / 8;
  return MatrixOffset<Traits>(lane, matrix / 2, matrix % 2);
}
// The address of vectors 2 * pair and 2 * pair + 1, from that of the first two.
template <typename Traits>
__device__ inline uint32_t PairAddress(uint32_t first, int pair) {
  return (first ^ (pair * 32 % Traits::kSwizzleBytes)) + pair * 32 / Traits::kSwizzleBytes * Traits::kSwizzleBytes;
}

// ---- S = Q * K^T
// -------------------------------------------------------------------------------------------------------

// A warp's scores, as the matrix products leave them: of keys g (two) and g + 8 (two), rows 2t and 2t + 1 (g = lane /
// 4, t = lane % 4).
template <typename Traits>
using ScoreFragment = float[Traits::kKeyTiles][Traits::kRowTiles][4];

// The scores of a KV block in shared memory, in units of log2.
template <typename Traits>
struct SharedScores {
  alignas(16) float scores[Traits::kWarps * Traits::kKeyTiles][Traits::kRows][16];  // [m16 tile][row][key]

  // Where a key's score stands in its row, so that the lanes that write, or read, at once hit different banks, or two
  // lanes the same.
  __device__ static int Column(int row, int key) { return key ^ row / 2 % 2 * 8; }
};

// k_tile: the address of the KV tile, plus KOffset.
template <typename Traits>
__device__ inline void ComputeScores(uint32_t k_tile, const QueryFragment<Traits>& query,
                                     ScoreFragment<Traits>& scores) {
  using T = typename Traits::Operand;
#pragma unroll
  for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[m][n][j] = 0.0f;
    }
  }
#pragma unroll
  for (int pair = 0; pair < Traits::kRowVectors / 2; ++pair) {
#pragma unroll
    for (int m = 0; m < Traits::kKeyTiles; ++m) {
      uint32_t k[4];
      LoadMatrix4(k, PairAddress<Traits>(k_tile + m * 16 * Traits::kRowBytes, pair));
      if constexpr (Traits::kFloat8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // 16 columns
          const uint32_t a[4] = {Float8PairToHalf2<Traits::kFloat8Kind>(k[2 * i]),
                                 Float8PairToHalf2<Traits::kFloat8Kind>(k[2 * i + 1]),
                                 Float8PairToHalf2<Traits::kFloat8Kind>(k[2 * i] >> 16),
                                 Float8PairToHalf2<Traits::kFloat8Kind>(k[2 * i + 1] >> 16)};
#pragma unroll
          for (int n = 0; n < Traits::kRowTiles; ++n) {
            const auto& b = query.words[n][2 * pair + i];
            Mma16x8x16<T>(scores[m][n], a, b[0], b[1]);
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n) {
          Mma16x8x16<T>(scores[m][n], k, query.words[n][pair][0], query.words[n][pair][1]);
        }
      }
    }
  }
}

// As MaskScores, with a tree_mask.
template <typename Traits>
__device__ inline void MaskTreeScores(const DecodeArgs& args, const KvView& kv, int lane, int keys_left,
                                      ScoreFragment<Traits>& scores) {
  const SequencePlan& plan = *kv.plan;
  // The new tokens' first key, counted from the tile's first.
  const int first_new = keys_left + (plan.end_key - kv.end_key) - plan.q_len;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(kv.row_tile * Traits::kRows + 8 * n + lane % 4 * 2 + i, plan.q_len * args.group_size - 1);
      const int query = args.QueryOf(row);
      const uint64_t tokens = args.TreeTokens(plan.q_begin + query);
#pragma unroll
      for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = 16 * m + 8 * j + lane / 4;
          const int token = key - first_new;
          const bool before_window = args.window > 0 && first_new + query - key >= args.window;
          const bool unseen = token >= 0 && (tokens >> (token & 63) & 1) == 0;
          if (key >= keys_left || unseen || before_window) scores[m][n][2 * j + i] = -INFINITY;
        }
      }
    }
  }
}

// Sets the scores of keys that a row does not see to -inf. keys_left: keys from the tile's first key to kv.end_key.
template <typename Traits>
__device__ inline void MaskScores(const DecodeArgs& args, const KvView& kv, int lane, int keys_left,
                                  ScoreFragment<Traits>& scores) {
  const SequencePlan& plan = *kv.plan;
  if constexpr (Traits::kTreeMask) {
    if (args.tree_mask != nullptr) return MaskTreeScores<Traits>(args, kv, lane, keys_left, scores);
  }
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(kv.row_tile * Traits::kRows + 8 * n + lane % 4 * 2 + i, plan.q_len * args.group_size - 1);
      // The last key that the row sees, counted from the tile's first.
      const int last = keys_left + (plan.end_key - kv.end_key) - plan.q_len + row / args.group_size;
#pragma unroll
      for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = 16 * m + 8 * j + lane / 4;
          const bool before_window = args.window > 0 && last - key >= args.window;
          if (key >= keys_left || key > last || before_window) scores[m][n][2 * j + i] = -INFINITY;
        }
      }
    }
  }
}

// Scales, caps and masks a warp's scores, and stores them for all warps. `bad`: a page number was outside the cache,
// which makes all rows NaN.
template <typename Traits>
__device__ inline void StoreScores(const DecodeArgs& args, const KvView& kv, const QueryFragment<Traits>& query,
                                   const Thread& thread, int keys_left, bool bad, ScoreFragment<Traits>& scores,
                                   SharedScores<Traits>& shared) {
  const int lane = thread.lane;
  float* const all = &scores[0][0][0];
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
    const float scale[2] = {query.Scale(n, 0), query.Scale(n, 1)};
#pragma unroll
    for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[m][n][j] *= scale[j % 2];
    }
  }
  if (args.cap != 0.0f) {
#pragma unroll
    for (int i = 0; i < Traits::kKeyTiles * Traits::kRowTiles * 4; ++i) {  // cap * tanh(score / cap), in units of log2
      all[i] = args.cap * TanhApprox(all[i] * args.cap_inverse);
    }
  }
  if (keys_left + kv.causal_tail < Traits::kTileKeys || args.window > 0) {
    MaskScores<Traits>(args, kv, lane, keys_left, scores);
  }
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
    for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 8 * n + lane % 4 * 2 + j % 2;
        shared
            .scores[thread.warp * Traits::kKeyTiles + m][row][SharedScores<Traits>::Column(row, lane / 4 + j / 2 * 8)] =
            bad ? NAN : scores[m][n][j];
      }
    }
  }
}

// ---- Online softmax and O += P * V
// -------------------------------------------------------------------------------------

// The accumulator over some keys, in registers. state[n]: of row g of row tile n, the same in all warps. o: of each of
// this warp's m16 tiles of columns, rows 2t and 2t + 1 of each row tile; [0] and [1] are of Column(0), [2] and [3] of
// Column(1).
template <typename Traits>
struct Accumulator {
  AttentionState state[Traits::kRowTiles];
  float o[Traits::kColumnTiles][Traits::kRowTiles][4];

  __device__ void Clear() {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      state[n] = {-INFINITY, 0.0f};
#pragma unroll
      for (int i = 0; i < Traits::kColumnTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][n][j] = 0.0f;
      }
    }
  }

  // The column of the output that half `half` of this warp's column tile `tile` holds.
  __device__ static int Column(const Thread& thread, int tile, int half) {
    const int g = thread.lane / 4;
    return 16 * (thread.warp * Traits::kColumnTiles + tile) + (Traits::kFloat8 ? 2 * g + half : g + 8 * half);
  }

  // Where this warp's columns are in a V tile, in the order of Update.
  static constexpr int kPairs = Traits::kFloat8 ? (Traits::kColumnTiles + 1) / 2 : Traits::kColumnTiles;
  struct VOffsets {
    uint32_t offset[kPairs];

    __device__ explicit VOffsets(const Thread& thread) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int tile = thread.warp * Traits::kColumnTiles + (Traits::kFloat8 ? 2 * i : i);
        offset[i] = PairAddress<Traits>(VOffset<Traits>(thread.lane), Traits::kFloat8 ? tile / 2 : tile);
      }
    }
  };

  // Adds a KV block. v_tiles: the address of the stage's first V tile; those of the other warps follow.
  __device__ void Update(const SharedScores<Traits>& shared, uint32_t v_tiles, const VOffsets& v_offsets,
                         const Thread& thread) {
    using T = typename Traits::Operand;
    const int lane = thread.lane;
    // Of row g, keys 2t, 2t + 1, 2t + 8 and 2t + 9 of each m16 tile.
    constexpr int kTiles = Traits::kWarps * Traits::kKeyTiles;
    float weights[kTiles][Traits::kRowTiles][4];
    float shift[Traits::kRowTiles];
    float correction[Traits::kRowTiles];
    bool max_changed = false;
    // Load the scores, and update the maxima.
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      const int row = 8 * n + lane / 4;
      const int column = SharedScores<Traits>::Column(row, lane % 4 * 2);
      float largest = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float2 low = *reinterpret_cast<const float2*>(&shared.scores[tile][row][column]);
        const float2 high = *reinterpret_cast<const float2*>(&shared.scores[tile][row][column ^ 8]);
        weights[tile][n][0] = low.x;
        weights[tile][n][1] = low.y;
        weights[tile][n][2] = high.x;
        weights[tile][n][3] = high.y;
        largest = fmaxf(largest, fmaxf(fmaxf(low.x, low.y), fmaxf(high.x, high.y)));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      largest = fmaxf(largest, state[n].max);
      max_changed = max_changed || largest != state[n].max;
      shift[n] = largest == -INFINITY ? 0.0f : largest;
      correction[n] = Exp2(state[n].max - shift[n]);
      state[n].max = largest;
      state[n].sum *= correction[n];
    }
    // Rescale. Where no maximum changed all corrections are 1.
    if (__any_sync(0xffffffffu, max_changed)) {
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n) {
        const float first_row = FromRow(correction[n], 0);
        const float second_row = FromRow(correction[n], 1);
#pragma unroll
        for (int i = 0; i < Traits::kColumnTiles; ++i) {
          o[i][n][0] *= first_row;
          o[i][n][1] *= second_row;
          o[i][n][2] *= first_row;
          o[i][n][3] *= second_row;
        }
      }
    }
    // Exponentials, and the product with V.
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t b[Traits::kRowTiles][2];
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n) {
        auto& p = weights[tile][n];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = Exp2(p[j] - shift[n]);
        state[n].sum += (p[0] + p[1]) + (p[2] + p[3]);
        b[n][0] = Pack<T>(p[0], p[1]);
        b[n][1] = Pack<T>(p[2], p[3]);
      }
      AddValues(v_tiles + tile * 16 * Traits::kRowBytes, v_offsets, thread, b);
    }
  }

  // Adds the values of an m16 tile of keys, with the weights as B operands. v_tile: the address of its values.
  __device__ void AddValues(uint32_t v_tile, const VOffsets& v_offsets, const Thread& thread,
                            const uint32_t (&b)[Traits::kRowTiles][2]) {
    using T = typename Traits::Operand;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      uint32_t v[4];
      LoadMatrix4Transposed(v, v_tile + v_offsets.offset[pair]);
      if constexpr (Traits::kFloat8) {
        // A warp with a single column tile has the second of a pair if its number is odd.
        const bool second = Traits::kColumnTiles == 1 && thread.warp % 2 == 1;
#pragma unroll
        for (int i = 0; i < (Traits::kColumnTiles == 1 ? 1 : 2); ++i) {
          // A register has two columns of each of two keys. The keys of a column have to stand side by side.
          const uint32_t low = __byte_perm(second ? v[1] : v[i], 0, 0x3120);
          const uint32_t high = __byte_perm(second ? v[3] : v[i + 2], 0, 0x3120);
          const uint32_t a[4] = {
              Float8PairToHalf2<Traits::kFloat8Kind>(low), Float8PairToHalf2<Traits::kFloat8Kind>(low >> 16),
              Float8PairToHalf2<Traits::kFloat8Kind>(high), Float8PairToHalf2<Traits::kFloat8Kind>(high >> 16)};
#pragma unroll
          for (int n = 0; n < Traits::kRowTiles; ++n) Mma16x8x16<T>(o[2 * pair + i][n], a, b[n][0], b[n][1]);
        }
      } else {
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n) Mma16x8x16<T>(o[pair][n], v, b[n][0], b[n][1]);
      }
    }
  }

  // Sums up state[].sum, of which each lane has the part of its own keys. Ends a split.
  __device__ void ReduceSums() {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      state[n].sum += __shfl_xor_sync(0xffffffffu, state[n].sum, 1);
      state[n].sum += __shfl_xor_sync(0xffffffffu, state[n].sum, 2);
    }
  }

  // Merges the accumulator of later keys into this one. Both have their sums reduced.
  __device__ void Merge(const Accumulator& later) {
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
      const MergeWeights row_weights = state[n].Merge(later.state[n]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const MergeWeights weights = {FromRow(row_weights.first, i), FromRow(row_weights.second, i)};
#pragma unroll
        for (int tile = 0; tile < Traits::kColumnTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& mine = o[tile][n][i + 2 * half];
            mine = weights.Merge(mine, later.o[tile][n][i + 2 * half]);
          }
        }
      }
    }
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_MAINLOOP_CUH_
