// What one warp of the decode kernel does with a tile of keys: score it, add it up.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WARP_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WARP_CUH_

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/cluster.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/device/tensor_copy.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_merge.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_shape.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_work.cuh"

namespace xla_gpu::decode {

// The query rows of a row tile as A operands. Columns of a float8 cache come four to a lane, in the cache's order, so
// the query's columns are put in the same order: a sum over head_dim does not mind.
template <typename S>
struct Query {
  uint32_t a[S::kQueryInRegisters ? S::kSteps : 1][4];
  float scale[2];  // of rows g and g + 8: scores are the products times it, in units of log2 (of 1 under a soft cap)

  // `shared`: room for kSteps * 32 * 16 bytes where the registers are short; the block's warps hold the same query.
  // Rows past the unit's repeat its last one: nobody reads their results.
  __device__ void Load(const DecodeArgs& args, const Walk<S>& walk, uint4* shared, int warp, int lane) {
    const char* rows[2];  // at this lane's first columns
    const int head_dim = static_cast<int>(args.params.head_dim);
    constexpr int kLaneColumns = S::kFloat8 ? 4 : 2;
    const int first_column = lane % 4 * kLaneColumns;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(walk.row_tile * kRows + lane / 4 + 8 * i, walk.NumRows(args) - 1);
      const int64_t at = RowPlace::Of(args, walk.sequence.q_begin, walk.head, row).at * head_dim + first_column;
      rows[i] = static_cast<const char*>(args.params.query) + 2 * at;
      scale[i] = args.params.scale;
    }
    if constexpr (S::kFloat8) {
      const float k_scale = __ldg(args.params.k_scale + (args.params.scale_per_head ? walk.head : 0));
      scale[0] *= k_scale;
      scale[1] *= k_scale;
    }
    const bool to_half = S::kFloat8 && args.params.dtype == DType::kBF16;
    float shrink[2] = {1.0f, 1.0f};
    if (to_half) {
      // bf16 has a wider range than float16: rows are scaled by a power of two to at most 2 in magnitude.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float largest = 0.0f;
        for (int column = 0; column + first_column < head_dim; column += 16) {
          const uint2 four = __ldg(reinterpret_cast<const uint2*>(rows[i] + 2 * column));
          const float2 low = Unpack<__nv_bfloat16>(four.x);
          const float2 high = Unpack<__nv_bfloat16>(four.y);
          largest = fmaxf(largest, fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        // Powers of two by their exponent bits; kept away from the ends of float32's range.
        const int exponent = min(max(static_cast<int>(__float_as_uint(largest) >> 23), 27), 227);
        shrink[i] = __uint_as_float((254 - exponent) << 23);
        scale[i] *= __uint_as_float(exponent << 23);
      }
    }
    if (args.params.soft_cap == 0.0f) {
      scale[0] *= kLog2E;
      scale[1] *= kLog2E;
    }
    const auto load_step = [&](int step, uint32_t(&to)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = 0;
      if constexpr (S::kFloat8) {
        if (step * 16 + first_column < head_dim) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint2 four = __ldg(reinterpret_cast<const uint2*>(rows[i] + step * 32));
            if (to_half) {
              const float2 low = Unpack<__nv_bfloat16>(four.x);
              const float2 high = Unpack<__nv_bfloat16>(four.y);
              four = {Pack<__half>(low.x * shrink[i], low.y * shrink[i]),
                      Pack<__half>(high.x * shrink[i], high.y * shrink[i])};
            }
            to[i] = four.x;
            to[i + 2] = four.y;
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (step * 16 < head_dim) to[i] = __ldg(reinterpret_cast<const uint32_t*>(rows[i] + step * 32));
          if (step * 16 + 8 < head_dim) to[i + 2] = __ldg(reinterpret_cast<const uint32_t*>(rows[i] + step * 32 + 16));
        }
      }
    };
    if constexpr (S::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) load_step(step, a[step]);
    } else {
      __syncthreads();  // the last query is no longer read
      for (int step = warp; step < S::kSteps; step += S::kWarps) {
        uint32_t four[4];
        load_step(step, four);
        shared[step * 32 + lane] = {four[0], four[1], four[2], four[3]};
      }
      __syncthreads();
    }
  }

  __device__ void Step(int step, const uint4* shared, uint32_t (&to)[4]) const {
    if constexpr (S::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = a[step][i];
    } else {
      const uint4 four = shared[step * 32 + threadIdx.x % 32];
      to[0] = four.x;
      to[1] = four.y;
      to[2] = four.z;
      to[3] = four.w;
    }
  }
};

// The running result of a strand: rows g (softmax[0], out[.][0], out[.][1]) and g + 8 of a lane. Until it is closed,
// the sums are of this lane's own keys.
template <typename S>
struct Strand {
  Softmax softmax[2];
  float out[S::kDim / 8][4];

  __device__ void Clear() {
    softmax[0] = softmax[1] = {-INFINITY, 0.0f};
#pragma unroll
    for (int i = 0; i < S::kDim / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
    }
  }

  // Adds the tile of keys [first_key, first_key + kTile) at shared address `tile`.
  __device__ void Add(const DecodeArgs& args, const Walk<S>& walk, const Query<S>& query, const uint4* shared_query,
                      uint32_t tile, int first_key, int lane) {
    constexpr int kColumns = S::kTile / 8;
    float score[kColumns][4];
    Score(query, shared_query, tile, score, lane);
    Transform(args, walk, query, first_key, score, lane);

    float largest[2] = {softmax[0].max, softmax[1].max};
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      largest[0] = fmaxf(largest[0], fmaxf(score[i][0], score[i][1]));
      largest[1] = fmaxf(largest[1], fmaxf(score[i][2], score[i][3]));
    }
    bool grown = false;
    float correction[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
      largest[i] = fmaxf(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
      grown = grown || largest[i] != softmax[i].max;
      const float shift = largest[i] == -INFINITY ? 0.0f : largest[i];
      correction[i] = Exp2(softmax[i].max - shift);
      softmax[i].max = largest[i];
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        score[j][2 * i] = Exp2(score[j][2 * i] - shift);
        score[j][2 * i + 1] = Exp2(score[j][2 * i + 1] - shift);
        sum += score[j][2 * i] + score[j][2 * i + 1];
      }
      softmax[i].sum = __fmaf_rn(softmax[i].sum, correction[i], sum);
    }
    if (__any_sync(0xffffffffu, grown)) {  // else the corrections are 1
#pragma unroll
      for (int i = 0; i < S::kDim / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][j] *= correction[j / 2];
      }
    }
    AddValues(tile + S::kTileBytes, score, lane);
  }

  // Clears the values of hidden keys in the tile at shared address `tile`, which the copy engine has fetched along with
  // the others: what stands there may be NaN.
  __device__ static void ClearHidden(const DecodeArgs& args, const Walk<S>& walk, uint32_t tile, int first_key,
                                     int lane) {
    const SequenceInfo& sequence = walk.sequence;
    const int64_t begin = args.params.sliding_window > 0
                              ? int64_t{sequence.context_len} - sequence.q_len - args.params.sliding_window + 1
                              : 0;
    if (first_key >= begin && first_key + S::kTile <= sequence.context_len) return;
    for (int row = 0; row < S::kTile; ++row) {
      if (first_key + row >= begin && first_key + row < sequence.context_len) continue;
      for (int chunk = lane; chunk < S::kRowBytes / 16; chunk += 32) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + S::kTileBytes + S::At(row, chunk)), "r"(0)
                     : "memory");
      }
    }
    FenceForCopies();
    __syncwarp();
  }

  // Adds up the lanes' sums. `bad`: a page number was wrong.
  __device__ void Close(bool bad) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      softmax[i].sum += __shfl_xor_sync(0xffffffffu, softmax[i].sum, 1);
      softmax[i].sum += __shfl_xor_sync(0xffffffffu, softmax[i].sum, 2);
      if (bad) softmax[i].sum = NAN;
    }
  }

  // Pairs of neighbouring output columns: pair `i` of row g + 8 * half, at columns 2 * PairAt(i) and one more.
  static constexpr int kPairs = S::kDim / 8;
  __device__ static int PairAt(int i, int lane) {
    const int t = lane % 4;
    return S::kFloat8 ? i / 2 * 8 + t * 2 + i % 2 : i * 4 + t;
  }
  __device__ float& PairElement(int i, int half, int element) {
    // NOTE: with float8, even columns of 16 come from one product and odd ones from the next.
    return S::kFloat8 ? out[i / 2 * 2 + element][2 * half + i % 2] : out[i][2 * half + element];
  }

 private:
  __device__ void Score(const Query<S>& query, const uint4* shared_query, uint32_t tile,
                        float (&score)[S::kTile / 8][4], int lane) {
    float odd[S::kTile / 8][4];  // odd steps apart: two short chains of products instead of a long one
#pragma unroll
    for (int i = 0; i < S::kTile / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) score[i][j] = odd[i][j] = 0.0f;
    }
    // Matrices of 8 keys: with float8 four of them at one step, else two of them at the step's two halves.
    const int row = S::kFloat8 ? lane : lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t a[4], k[4];
      query.Step(step, shared_query, a);
      LoadMatrix4(k, tile + S::At(row, S::kFloat8 ? step : step * 2 + lane / 8 % 2));
      if constexpr (S::kFloat8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Mma16x8x16<__half>(step % 2 ? odd[i] : score[i], a, Float8PairToHalf2<S::kFloat8Kind>(k[i]),
                             Float8PairToHalf2<S::kFloat8Kind>(k[i] >> 16));
        }
      } else {
        Mma16x8x16<typename S::Operand>(step % 2 ? odd[0] : score[0], a, k[0], k[1]);
        Mma16x8x16<typename S::Operand>(step % 2 ? odd[1] : score[1], a, k[2], k[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < S::kTile / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) score[i][j] += odd[i][j];
    }
  }

  // Scale, soft cap and mask.
  __device__ void Transform(const DecodeArgs& args, const Walk<S>& walk, const Query<S>& query, int first_key,
                            float (&score)[S::kTile / 8][4], int lane) {
    const PagedAttentionParams& params = args.params;
    const SequenceInfo& sequence = walk.sequence;
#pragma unroll
    for (int i = 0; i < S::kTile / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) score[i][j] *= query.scale[j / 2];
    }
    if (params.soft_cap != 0.0f) {
      const float inverse = 2.0f * kLog2E / params.soft_cap;
#pragma unroll
      for (int i = 0; i < S::kTile / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // cap * tanh(score / cap), in units of log2
          const float tanh = 1.0f - __fdividef(2.0f, Exp2(score[i][j] * inverse) + 1.0f);
          score[i][j] = params.soft_cap * kLog2E * tanh;
        }
      }
    }
    const int first_query = sequence.context_len - sequence.q_len;  // its position
    const bool all_see_end = first_key + S::kTile <= first_query + 1;
    const bool all_see_begin =
        params.sliding_window == 0 || first_key > int64_t{sequence.context_len} - 1 - params.sliding_window;
    if (all_see_end && all_see_begin) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = walk.row_tile * kRows + lane / 4 + 8 * i;
      const int position = first_query + row / args.group;
      const int64_t hidden = params.sliding_window > 0 ? int64_t{position} - params.sliding_window : int64_t{-1};
#pragma unroll
      for (int j = 0; j < S::kTile / 8; ++j) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int key = first_key + j * 8 + lane % 4 * 2 + n;
          if (key > position || key >= sequence.context_len || key <= hidden) score[j][2 * i + n] = -INFINITY;
        }
      }
    }
  }

  __device__ void AddValues(uint32_t tile, const float (&score)[S::kTile / 8][4], int lane) {
    using T = typename S::Operand;
    uint32_t p[S::kTile / 16][4];
#pragma unroll
    for (int i = 0; i < S::kTile / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        p[i][j] = Pack<T>(score[2 * i + j / 2][j % 2 * 2], score[2 * i + j / 2][j % 2 * 2 + 1]);
    }
    // Matrices of 8 keys by 16 bytes: with float8 all 32 keys of 16 columns, else both halves of 16 keys by 16 columns.
    const int row = S::kFloat8 ? lane : lane % 16;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t v[4];
      LoadMatrix4Transposed(v, tile + S::At(row, S::kFloat8 ? step : step * 2 + lane / 16));
      if constexpr (S::kFloat8) {
        uint32_t even[4], odd[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32_t sorted = __byte_perm(v[i], 0, 0x3120);  // two keys of the even column, then of the odd one
          even[i] = Float8PairToHalf2<S::kFloat8Kind>(sorted);
          odd[i] = Float8PairToHalf2<S::kFloat8Kind>(sorted >> 16);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Mma16x8x16<T>(out[2 * step], p[i], even[2 * i], even[2 * i + 1]);
          Mma16x8x16<T>(out[2 * step + 1], p[i], odd[2 * i], odd[2 * i + 1]);
        }
      } else {
        Mma16x8x16<T>(out[2 * step], p[0], v[0], v[1]);
        Mma16x8x16<T>(out[2 * step + 1], p[0], v[2], v[3]);
      }
    }
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_WARP_CUH_
