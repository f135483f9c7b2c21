// What one warp of the decode kernel does with a step of the block: score the keys of its own tile, publish the scores,
// and add up its own columns of the values of all four tiles, with everybody's scores.
//
// scores[key][row] = K · Qᵀ, for 16 keys and 8 rows at a time; out[column][row] = Vᵀ · weightsᵀ, for 16 columns, 16
// keys and 8 rows. Between them scores pass through shared memory, which brings them to the lanes that want them as
// weights. float8 is converted to float16 on the way; then a sum over columns runs in the order in which a lane gets
// them: four neighbouring bytes of a key, and two of each of two values.
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

// Two chunks (of 16 bytes) of 16 rows of a tile are four matrices of eight rows and a chunk. A lane gives the address
// of a row of one: of keys first those of both halves of the rows, then of the other chunk, of values first both
// chunks.
template <typename S>
__device__ inline uint32_t MatrixOffset(int lane, int half, int chunk) {
  const int row = half * 8 + lane % 8;
  return row * S::kRowBytes + (chunk ^ S::Swizzle(row)) * 16;
}
template <typename S>
__device__ inline uint32_t KeyOffset(int lane) {
  const int matrix = lane / 8;
  return MatrixOffset<S>(lane, matrix % 2, matrix / 2);
}
template <typename S>
__device__ inline uint32_t ValueOffset(int lane) {
  const int matrix = lane / 8;
  return MatrixOffset<S>(lane, matrix / 2, matrix % 2);
}
// The address of chunks 2 * pair and 2 * pair + 1, from that of the first two.
template <typename S>
__device__ inline uint32_t PairAddress(uint32_t first, int pair) {
  return (first ^ (pair * 32 % S::kSwizzleBytes)) + pair * 32 / S::kSwizzleBytes * S::kSwizzleBytes;
}

// Scores of 16 keys and a row tile: of keys g (two) and g + 8 (two), rows 2t and 2t + 1 (g = lane / 4, t = lane % 4).
template <typename S>
using Scores = float[S::kKeyTiles][S::kRowTiles][4];

// The scores of a step, in units of log2: of each tile of 16 keys row after row.
template <typename S>
struct Published {
  alignas(16) float scores[S::kWarps * S::kKeyTiles][S::kRows][16];

  // Where a key's score stands in its row: lanes that write, or read, at once hit different banks, or two the same.
  __device__ static int Place(int row, int key) { return key ^ row / 2 % 2 * 8; }
};

// `keys`: the tile's place, plus KeyOffset.
template <typename S>
__device__ inline void MultiplyKeys(uint32_t keys, const Query<S>& query, Scores<S>& scores) {
  using T = typename S::Operand;
#pragma unroll
  for (int m = 0; m < S::kKeyTiles; ++m) {
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[m][n][j] = 0.0f;
    }
  }
#pragma unroll
  for (int pair = 0; pair < S::kRowChunks / 2; ++pair) {
#pragma unroll
    for (int m = 0; m < S::kKeyTiles; ++m) {
      uint32_t k[4];
      LoadMatrix4(k, PairAddress<S>(keys + m * 16 * S::kRowBytes, pair));
      if constexpr (S::kFloat8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // 16 columns
          const uint32_t a[4] = {
              Float8PairToHalf2<S::kFloat8Kind>(k[2 * i]), Float8PairToHalf2<S::kFloat8Kind>(k[2 * i + 1]),
              Float8PairToHalf2<S::kFloat8Kind>(k[2 * i] >> 16), Float8PairToHalf2<S::kFloat8Kind>(k[2 * i + 1] >> 16)};
#pragma unroll
          for (int n = 0; n < S::kRowTiles; ++n) {
            const auto& b = query.words[n][2 * pair + i];
            Mma16x8x16<T>(scores[m][n], a, b[0], b[1]);
          }
        }
      } else {
#pragma unroll
        for (int n = 0; n < S::kRowTiles; ++n) {
          Mma16x8x16<T>(scores[m][n], k, query.words[n][pair][0], query.words[n][pair][1]);
        }
      }
    }
  }
}

// Takes away the scores of keys that a row does not see. The tile's first key is `left` keys before unit.end_key.
template <typename S>
__device__ inline void MaskScores(const DecodeArgs& args, const UnitView& unit, int lane, int left, Scores<S>& scores) {
  const PlanEntry& entry = *unit.entry;
#pragma unroll
  for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(unit.row_tile * S::kRows + 8 * n + lane % 4 * 2 + i, entry.q_len * args.group - 1);
      // The last key that the row sees, counted from the tile's first.
      const int last = left + (entry.end_key - unit.end_key) - entry.q_len + row / args.group;
#pragma unroll
      for (int m = 0; m < S::kKeyTiles; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = 16 * m + 8 * j + lane / 4;
          const bool hidden = args.window > 0 && last - key >= args.window;
          if (key >= left || key > last || hidden) scores[m][n][2 * j + i] = -INFINITY;
        }
      }
    }
  }
}

// Turns products into scores, and publishes them. `bad`: a page number was wrong, which spoils all rows.
template <typename S>
__device__ inline void PublishScores(const DecodeArgs& args, const UnitView& unit, const Query<S>& query,
                                     const Thread& thread, int left, bool bad, Scores<S>& scores,
                                     Published<S>& published) {
  const int lane = thread.lane;
  float* const all = &scores[0][0][0];
#pragma unroll
  for (int n = 0; n < S::kRowTiles; ++n) {
    const float scale[2] = {query.Scale(n, 0), query.Scale(n, 1)};
#pragma unroll
    for (int m = 0; m < S::kKeyTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[m][n][j] *= scale[j % 2];
    }
  }
  if (args.cap != 0.0f) {
#pragma unroll
    for (int i = 0; i < S::kKeyTiles * S::kRowTiles * 4; ++i) {  // cap * tanh(score / cap), in units of log2
      all[i] = args.cap * (1.0f - __fdividef(2.0f, Exp2(all[i] * args.cap_inverse) + 1.0f));
    }
  }
  if (left + unit.hidden_by_end < S::kTileKeys || args.window > 0) MaskScores<S>(args, unit, lane, left, scores);
#pragma unroll
  for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
    for (int m = 0; m < S::kKeyTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = 8 * n + lane % 4 * 2 + j % 2;
        published.scores[thread.warp * S::kKeyTiles + m][row][Published<S>::Place(row, lane / 4 + j / 2 * 8)] =
            bad ? NAN : scores[m][n][j];
      }
    }
  }
}

// The sums over some keys: of row g of each row tile the softmax, which all warps have; of each of this warp's matrix
// tiles of 16 columns, for rows 2t and 2t + 1 of each tile of 8, two columns: c[0] and c[1] are of Column(0), c[2] and
// c[3] of Column(1).
template <typename S>
struct Running {
  Softmax softmax[S::kRowTiles];
  float out[S::kOwnTiles][S::kRowTiles][4];

  __device__ void Clear() {
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      softmax[n] = {-INFINITY, 0.0f};
#pragma unroll
      for (int i = 0; i < S::kOwnTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][n][j] = 0.0f;
      }
    }
  }

  // The column of tile `tile` of this warp's.
  __device__ static int Column(const Thread& thread, int tile, int half) {
    const int g = thread.lane / 4;
    return 16 * (thread.warp * S::kOwnTiles + tile) + (S::kFloat8 ? 2 * g + half : g + 8 * half);
  }

  // Where this warp's columns of a tile of values are, in the order of AddStep.
  static constexpr int kPairs = S::kFloat8 ? (S::kOwnTiles + 1) / 2 : S::kOwnTiles;
  struct ValueOffsets {
    uint32_t at[kPairs];

    __device__ explicit ValueOffsets(const Thread& thread) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int tile = thread.warp * S::kOwnTiles + (S::kFloat8 ? 2 * i : i);
        at[i] = PairAddress<S>(ValueOffset<S>(thread.lane), S::kFloat8 ? tile / 2 : tile);
      }
    }
  };

  // Adds a step of the block. `values`: its first tile's place; the others follow.
  __device__ void AddStep(const Published<S>& published, uint32_t values, const ValueOffsets& offsets,
                          const Thread& thread) {
    using T = typename S::Operand;
    const int lane = thread.lane;
    // Of row g, keys 2t, 2t + 1, 2t + 8 and 2t + 9 of each tile.
    constexpr int kTiles = S::kWarps * S::kKeyTiles;
    float weights[kTiles][S::kRowTiles][4];
    float shift[S::kRowTiles];
    float correction[S::kRowTiles];
    bool grown = false;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      const int row = 8 * n + lane / 4;
      const int place = Published<S>::Place(row, lane % 4 * 2);
      float largest = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float2 low = *reinterpret_cast<const float2*>(&published.scores[tile][row][place]);
        const float2 high = *reinterpret_cast<const float2*>(&published.scores[tile][row][place ^ 8]);
        weights[tile][n][0] = low.x;
        weights[tile][n][1] = low.y;
        weights[tile][n][2] = high.x;
        weights[tile][n][3] = high.y;
        largest = fmaxf(largest, fmaxf(fmaxf(low.x, low.y), fmaxf(high.x, high.y)));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      largest = fmaxf(largest, softmax[n].max);
      grown = grown || largest != softmax[n].max;
      shift[n] = largest == -INFINITY ? 0.0f : largest;
      correction[n] = Exp2(softmax[n].max - shift[n]);
      softmax[n].max = largest;
      softmax[n].sum *= correction[n];
    }
    if (__any_sync(0xffffffffu, grown)) {  // else the corrections are 1
#pragma unroll
      for (int n = 0; n < S::kRowTiles; ++n) {
        const float first_row = OfRow(correction[n], 0);
        const float second_row = OfRow(correction[n], 1);
#pragma unroll
        for (int i = 0; i < S::kOwnTiles; ++i) {
          out[i][n][0] *= first_row;
          out[i][n][1] *= second_row;
          out[i][n][2] *= first_row;
          out[i][n][3] *= second_row;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      uint32_t b[S::kRowTiles][2];
#pragma unroll
      for (int n = 0; n < S::kRowTiles; ++n) {
        auto& of_row = weights[tile][n];
#pragma unroll
        for (int j = 0; j < 4; ++j) of_row[j] = Exp2(of_row[j] - shift[n]);
        softmax[n].sum += (of_row[0] + of_row[1]) + (of_row[2] + of_row[3]);
        b[n][0] = Pack<T>(of_row[0], of_row[1]);
        b[n][1] = Pack<T>(of_row[2], of_row[3]);
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        uint32_t v[4];
        LoadMatrix4Transposed(v, values + tile * 16 * S::kRowBytes + offsets.at[pair]);
        if constexpr (S::kFloat8) {
          // With one tile for a warp, it is the second of its pair for every other warp.
          const bool second = S::kOwnTiles == 1 && thread.warp % 2 == 1;
#pragma unroll
          for (int i = 0; i < (S::kOwnTiles == 1 ? 1 : 2); ++i) {
            // Of two keys two columns each; the keys of a column shall stand side by side.
            const uint32_t low = __byte_perm(second ? v[1] : v[i], 0, 0x3120);
            const uint32_t high = __byte_perm(second ? v[3] : v[i + 2], 0, 0x3120);
            const uint32_t a[4] = {Float8PairToHalf2<S::kFloat8Kind>(low), Float8PairToHalf2<S::kFloat8Kind>(low >> 16),
                                   Float8PairToHalf2<S::kFloat8Kind>(high),
                                   Float8PairToHalf2<S::kFloat8Kind>(high >> 16)};
#pragma unroll
            for (int n = 0; n < S::kRowTiles; ++n) Mma16x8x16<T>(out[2 * pair + i][n], a, b[n][0], b[n][1]);
          }
        } else {
#pragma unroll
          for (int n = 0; n < S::kRowTiles; ++n) Mma16x8x16<T>(out[pair][n], v, b[n][0], b[n][1]);
        }
      }
    }
  }

  // Adds up the lanes' sums: until then each has those over its own keys.
  __device__ void Close() {
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      softmax[n].sum += __shfl_xor_sync(0xffffffffu, softmax[n].sum, 1);
      softmax[n].sum += __shfl_xor_sync(0xffffffffu, softmax[n].sum, 2);
    }
  }

  // Merges closed sums, of keys that come later, into these.
  __device__ void Add(const Running& other) {
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      const MergeFactors of_row = MergeInto(softmax[n], other.softmax[n]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const MergeFactors factors = {OfRow(of_row.first, i), OfRow(of_row.second, i)};
#pragma unroll
        for (int tile = 0; tile < S::kOwnTiles; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float& mine = out[tile][n][i + 2 * half];
            mine = Merge(mine, other.out[tile][n][i + 2 * half], factors);
          }
        }
      }
    }
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_MAINLOOP_CUH_
