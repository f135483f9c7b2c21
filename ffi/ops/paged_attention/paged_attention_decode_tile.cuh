// What one warp of the decode kernel does with its keys: fetch them, score them, add their values up.
//
// Keys and values go from the cache straight into the registers in which the tensor cores want them. A sum over columns
// may run in any order, so a lane takes 16 neighbouring bytes of a key as they are, and the query's columns in the same
// order: scores[row][key] = Q · Kᵀ, for 16 rows and 8 keys at a time. The weights leave that product in the order in
// which out[column][row] = Vᵀ · weightsᵀ wants them, for 16 columns, 16 keys and 8 rows at a time; columns of the
// output may stand in any order, so a lane takes 16 neighbouring bytes of each of its values and pairs the columns of
// two keys.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_TILE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_TILE_CUH_

#include <cstdint>

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_fetch.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_merge.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_plan.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_shape.cuh"

namespace xla_gpu::decode {

// Element i of a vector, for i known at compile time.
__device__ inline uint32_t& Word(uint4& vector, int i) {
  return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}
__device__ inline uint32_t Word(const uint4& vector, int i) {
  return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

// NOTE: volatile, lest the compiler keep the query in registers.
__device__ inline void LoadShared16(const void* from, uint32_t (&to)[4]) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))));
}

// The query rows of a row tile as A operands, in shared memory and in the cache's order of columns.
template <typename S>
struct Query {
  // Of rows g and g + 8 (g = lane / 4), the rows of this lane's scores: these are products times it, in units of log2
  // (of 1 under a soft cap).
  float scale[S::kFloat8 ? S::kRowTiles : 1];
  static constexpr int kMine = (S::kQueryVectors + S::kWarps - 1) / S::kWarps;
  uint4 mine[S::kRowTiles][kMine];

  // Fetches this warp's part. Rows past the unit's repeat its last one: nobody reads their results.
  __device__ void Load(const DecodeArgs& args, const PlanEntry& entry, const UnitPlace& unit) {
    const PagedAttentionParams& params = args.params;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int head_dim = static_cast<int>(params.head_dim);
    const int last_row = entry.q_len * args.group - 1;
    float score_scale = params.scale;
    if constexpr (S::kFloat8) score_scale *= __ldg(params.k_scale + (params.scale_per_head ? unit.kv_head : 0));
    if (params.soft_cap == 0.0f) score_scale *= kLog2E;
#pragma unroll
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      const int row = min(unit.row_tile * S::kRows + 8 * tile + lane / 4, last_row);
      const int64_t at = RowPlace::Of(args, entry.q_begin, unit.kv_head, row).at * head_dim;
      const char* const from = static_cast<const char*>(params.query) + 2 * at;
      const auto load = [&](int i) {
        const int column = S::kFloat8 ? i / 2 * 64 + lane % 4 * 16 + i % 2 * 8 : i * 32 + lane % 4 * 8;
        uint4 vector = {0, 0, 0, 0};
        if (column < head_dim) vector = __ldg(reinterpret_cast<const uint4*>(from + 2 * column));
        return vector;
      };
      scale[S::kFloat8 ? tile : 0] = score_scale;
      if constexpr (S::kFloat8) {
        uint4 row_vectors[S::kQueryVectors];
#pragma unroll
        for (int i = 0; i < S::kQueryVectors; ++i) row_vectors[i] = load(i);
        if (params.dtype == DType::kBF16) scale[tile] *= ToHalf(row_vectors);
#pragma unroll
        for (int i = 0; i < S::kQueryVectors; ++i) {
          if (i % S::kWarps == warp) mine[tile][i / S::kWarps] = row_vectors[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < kMine; ++i) mine[tile][i] = load(i * S::kWarps + warp);
      }
    }
  }

  // Hands it to the block, which synchronizes before and after.
  __device__ void Share(uint4 (&shared)[S::kSteps][32]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int vector = i * S::kWarps + warp;
      if (vector >= S::kQueryVectors) break;
      const uint4 low = mine[0][i];
      const uint4 high = S::kRowTiles == 2 ? mine[S::kRowTiles - 1][i] : uint4{0, 0, 0, 0};
      shared[2 * vector][lane] = {low.x, high.x, low.y, high.y};
      shared[2 * vector + 1][lane] = {low.z, high.z, low.w, high.w};
    }
  }

  __device__ float Scale(int tile) const { return scale[S::kFloat8 ? tile : 0]; }

 private:
  // bf16 has a wider range than float16: the row is scaled by a power of two to at most 2 in magnitude, whose inverse
  // is returned.
  __device__ static float ToHalf(uint4 (&row)[S::kQueryVectors]) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kQueryVectors; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float2 two = Unpack<__nv_bfloat16>(Word(row[i], word));
        largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    // Powers of two by their exponent bits; kept away from the ends of float32's range.
    const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 27), 227);
    const float shrink = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < S::kQueryVectors; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const float2 two = Unpack<__nv_bfloat16>(Word(row[i], word));
        Word(row[i], word) = Pack<__half>(two.x * shrink, two.y * shrink);
      }
    }
    return __uint_as_float(exponent << 23);
  }
};

// A warp's running result over its keys of a chunk. Of rows g and g + 8 (g = lane / 4) a lane has the softmax over its
// own keys; of each matrix tile of 16 columns, for rows 2t and 2t + 1 (t = lane % 4) of each tile of 8, two
// neighbouring columns: c[0] and c[1] the first, c[2] and c[3] the second.
template <typename S>
struct Running {
  float max[S::kRowTiles];
  float sum[S::kRowTiles];
  float out[S::kOutTiles][S::kRowTiles][4];

  __device__ void Clear() {
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      max[n] = -INFINITY;
      sum[n] = 0.0f;
#pragma unroll
      for (int i = 0; i < S::kOutTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][n][j] = 0.0f;
      }
    }
  }

  // Of eight keys each: rows g (two) and g + 8 (two), keys 2t and 2t + 1.
  using Scores = float[2 * S::kKeyTiles][4];

  __device__ static void Multiply(const DecodeArgs& args, const KeyTile<S>& keys, const uint4 (&query)[S::kSteps][32],
                                  Scores& scores) {
    using T = typename S::Operand;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < S::kKeyTiles * 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = 0.0f;
    }
    constexpr int kChunkSteps = S::kSteps / S::kKeyChunks;  // matrix steps of 16 columns in 16 bytes of four lanes
    // Past head_dim the query has zeros, but 0 * inf is not 0. By halves of a chunk.
    bool past[S::kKeyChunks - S::kFixedKeyChunks][2];
#pragma unroll
    for (int j = S::kFixedKeyChunks; j < S::kKeyChunks; ++j) {
      past[j - S::kFixedKeyChunks][0] = PastHeadDim<S>(args, 64 * j);
      past[j - S::kFixedKeyChunks][1] = S::kNarrow ? PastHeadDim<S>(args, 64 * j + 8) : past[j - S::kFixedKeyChunks][0];
    }
    const auto word_of = [&](const uint4& chunk, int j, int i) {
      return j >= S::kFixedKeyChunks && past[j < S::kFixedKeyChunks ? 0 : j - S::kFixedKeyChunks][i / 2]
                 ? 0u
                 : Word(chunk, i);
    };
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t a[4];
      LoadShared16(&query[step][lane], a);
      const int word = step % kChunkSteps;
#pragma unroll
      for (int i = 0; i < S::kKeyTiles * 2; ++i) {
        const int j = step / kChunkSteps;
        const uint4& chunk = keys.at[i][j];
        if constexpr (S::kFloat8) {
          const uint32_t four = word_of(chunk, j, word);
          Mma16x8x16<T>(scores[i], a, Float8PairToHalf2<S::kFloat8Kind>(four),
                        Float8PairToHalf2<S::kFloat8Kind>(four >> 16));
        } else {
          Mma16x8x16<T>(scores[i], a, word_of(chunk, j, 2 * word), word_of(chunk, j, 2 * word + 1));
        }
      }
    }
  }

  // Turns products into weights, and adds these up. The tile's first key is `left` keys before unit.end_key.
  __device__ void Weigh(const DecodeArgs& args, const UnitView& unit, const Query<S>& query, int left, Scores& scores) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kTiles = 2 * S::kKeyTiles;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < S::kRowTiles; ++n) {
        scores[i][2 * n] *= query.Scale(n);
        scores[i][2 * n + 1] *= query.Scale(n);
      }
    }
    if (args.params.soft_cap != 0.0f) {
      const float inverse = 2.0f * kLog2E / args.params.soft_cap;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * S::kRowTiles; ++j) {  // cap * tanh(score / cap), in units of log2
          const float tanh = 1.0f - __fdividef(2.0f, Exp2(scores[i][j] * inverse) + 1.0f);
          scores[i][j] = args.params.soft_cap * kLog2E * tanh;
        }
      }
    }
    if (left + unit.hidden_by_end < S::kTileKeys || args.window > 0) Mask(args, unit, left, scores);

    float correction[S::kRowTiles];
    bool grown = false;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      float largest = fmaxf(scores[0][2 * n], scores[0][2 * n + 1]);
#pragma unroll
      for (int i = 1; i < kTiles; ++i) largest = fmaxf(largest, fmaxf(scores[i][2 * n], scores[i][2 * n + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      largest = fmaxf(largest, max[n]);
      grown = grown || largest != max[n];
      const float shift = largest == -INFINITY ? 0.0f : largest;
      correction[n] = Exp2(max[n] - shift);
      max[n] = largest;
      float added = 0.0f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        scores[i][2 * n] = Exp2(scores[i][2 * n] - shift);
        scores[i][2 * n + 1] = Exp2(scores[i][2 * n + 1] - shift);
        added += scores[i][2 * n] + scores[i][2 * n + 1];
      }
      sum[n] = __fmaf_rn(sum[n], correction[n], added);
    }
    if (__any_sync(0xffffffffu, grown)) {  // else the corrections are 1
#pragma unroll
      for (int n = 0; n < S::kRowTiles; ++n) {
        const float first_row = __shfl_sync(0xffffffffu, correction[n], lane % 4 * 8);
        const float second_row = __shfl_sync(0xffffffffu, correction[n], lane % 4 * 8 + 4);
#pragma unroll
        for (int i = 0; i < S::kOutTiles; ++i) {
          out[i][n][0] *= first_row;
          out[i][n][1] *= second_row;
          out[i][n][2] *= first_row;
          out[i][n][3] *= second_row;
        }
      }
    }
  }

  // Takes away the scores of keys that a row does not see.
  __device__ static void Mask(const DecodeArgs& args, const UnitView& unit, int left, Scores& scores) {
    const PlanEntry& entry = *unit.entry;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      const int row = min(unit.row_tile * S::kRows + 8 * n + lane / 4, entry.q_len * args.group - 1);
      // The last key that the row sees, counted from the tile's first.
      const int last = left + (entry.end_key - unit.end_key) - entry.q_len + row / args.group;
#pragma unroll
      for (int i = 0; i < 2 * S::kKeyTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int key = 8 * i + lane % 4 * 2 + j;
          const bool hidden = args.window > 0 && last - key >= args.window;
          if (key >= left || key > last || hidden) scores[i][2 * n + j] = -INFINITY;
        }
      }
    }
  }

  __device__ void AddValues(const ValueTile<S>& values, const Scores& weights) {
    using T = typename S::Operand;
#pragma unroll
    for (int m = 0; m < S::kKeyTiles; ++m) {
      uint32_t b[S::kRowTiles][2];
#pragma unroll
      for (int n = 0; n < S::kRowTiles; ++n) {
        b[n][0] = Pack<T>(weights[2 * m][2 * n], weights[2 * m][2 * n + 1]);
        b[n][1] = Pack<T>(weights[2 * m + 1][2 * n], weights[2 * m + 1][2 * n + 1]);
      }
      const auto& at = values.at;
#pragma unroll
      for (int j = 0; j < S::kValueChunks; ++j) {
        constexpr int kWords = S::kValueBytes / 4;
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
          const uint32_t v[4] = {Word(at[4 * m][j], k), Word(at[4 * m + 1][j], k), Word(at[4 * m + 2][j], k),
                                 Word(at[4 * m + 3][j], k)};
          if constexpr (S::kFloat8) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // two columns each
              const uint32_t first = __byte_perm(v[0], v[1], half ? 0x7362 : 0x5140);
              const uint32_t second = __byte_perm(v[2], v[3], half ? 0x7362 : 0x5140);
              const uint32_t a[4] = {
                  Float8PairToHalf2<S::kFloat8Kind>(first), Float8PairToHalf2<S::kFloat8Kind>(first >> 16),
                  Float8PairToHalf2<S::kFloat8Kind>(second), Float8PairToHalf2<S::kFloat8Kind>(second >> 16)};
#pragma unroll
              for (int n = 0; n < S::kRowTiles; ++n) {
                Mma16x8x16<T>(out[(j * kWords + k) * 2 + half][n], a, b[n][0], b[n][1]);
              }
            }
          } else {
            const uint32_t a[4] = {__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[0], v[1], 0x7632),
                                   __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[2], v[3], 0x7632)};
#pragma unroll
            for (int n = 0; n < S::kRowTiles; ++n) Mma16x8x16<T>(out[j * kWords + k][n], a, b[n][0], b[n][1]);
          }
        }
      }
    }
  }

  // Adds up the lanes' sums. `bad`: a page number was wrong.
  __device__ void Close(bool bad) {
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], 1);
      sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], 2);
      if (bad) sum[n] = NAN;
    }
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_TILE_CUH_
