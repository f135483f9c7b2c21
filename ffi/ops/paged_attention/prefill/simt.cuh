// Prefill attention in float32 by fused multiply-adds, with float32's accuracy, which the tensor cores' tf32 lacks. A
// CTA keeps the Q of a work tile in shared memory and walks over the key tiles with an online softmax. K and V share
// one buffer in shared memory.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SIMT_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SIMT_CUH_

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/device/float8.cuh"
#include "ffi/ops/paged_attention/prefill/rows.cuh"
#include "ffi/ops/paged_attention/prefill/tile_scheduler.cuh"

namespace xla_gpu::prefill {

// kDim: head_dim, rounded up. Threads form a grid of kColumns × (kThreads / kColumns); each has four rows of the tile.
template <int kDim>
struct SimtWorkTile {
  static constexpr bool kChecksPages = false;  // see RunWorkTile
  static constexpr int kThreads = 128;
  static constexpr int kColumns = kDim > 128 ? 16 : 8;
  static constexpr int kRowThreads = kThreads / kColumns;
  static constexpr int kRows = 4 * kRowThreads;
  static constexpr int kKeys = 32;
  static constexpr int kKeysPerThread = kKeys / kColumns;
  static constexpr int kQuads = kDim / 4 / kColumns;  // float4s of one row's result in one thread

  // Rows are padded by one float4: neighbouring rows begin in other banks.
  static constexpr int kStride = kDim + 4;
  static constexpr int kProbStride = kKeys + 4;
  static constexpr int kOffsetStart =
      ((kRows + kKeys) * kStride + kRows * kProbStride) * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kOffsetStart + kKeys * static_cast<int>(sizeof(int64_t));

  using Scheduler = SingleTileScheduler<kThreads, kRows>;
  static_assert(sizeof(typename Scheduler::Storage) <= kSharedBytes);

  const PagedAttentionParams& params;
  float* const query;          // [kRows][kStride]
  float* const cache_tile;     // [kKeys][kStride]
  float* const probabilities;  // [kRows][kProbStride]
  int64_t* const offsets;      // [kKeys]
  const int thread = static_cast<int>(threadIdx.x);
  const int column = static_cast<int>(threadIdx.x) % kColumns;
  const int row_thread = static_cast<int>(threadIdx.x) / kColumns;  // rows row_thread + i * kRowThreads

  __device__ SimtWorkTile(const PagedAttentionParams& params, char* shared)
      : params(params),
        query(reinterpret_cast<float*>(shared)),
        cache_tile(query + kRows * kStride),
        probabilities(cache_tile + kKeys * kStride),
        offsets(reinterpret_cast<int64_t*>(shared + kOffsetStart)) {}

  __device__ void LoadQuery(const TileRows<>& rows) const {
    const float* const source = static_cast<const float*>(params.query);
#pragma unroll 4
    for (int i = thread; i < kRows * kDim / 4; i += kThreads) {
      const int row = i / (kDim / 4);
      const int d = i % (kDim / 4) * 4;
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row < rows.count && d < params.head_dim) {
        x = *reinterpret_cast<const float4*>(source + rows.HeadRow(row) * params.head_dim + d);
      }
      *reinterpret_cast<float4*>(query + row * kStride + d) = x;
    }
  }

  // Keys that no row sees, and the dimensions past head_dim, are zeros.
  __device__ void LoadTile(const char* cache) const {
#pragma unroll 4
    for (int i = thread; i < kKeys * kDim / 4; i += kThreads) {
      const int row = i / (kDim / 4);
      const int d = i % (kDim / 4) * 4;
      const int64_t offset = offsets[row];
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (offset >= 0 && d < params.head_dim) {
        if (params.cache_dtype == DType::kF32) {
          x = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(cache) + offset + d);
        } else {
          const uint32_t raw = *reinterpret_cast<const uint32_t*>(cache + offset + d);
          x = params.cache_dtype == DType::kF8E4M3FN ? Float8ToFloat4<true>(raw) : Float8ToFloat4<false>(raw);
        }
      }
      *reinterpret_cast<float4*>(cache_tile + row * kStride + d) = x;
    }
  }

  __device__ static float Dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
  }

  __device__ void Scores(float (&s)[1][4][kKeysPerThread]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kKeysPerThread; ++j) s[0][i][j] = 0.0f;
    }
#pragma unroll 4
    for (int d = 0; d < kDim; d += 4) {
      float4 q[4], k[kKeysPerThread];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[i] = *reinterpret_cast<const float4*>(query + (row_thread + i * kRowThreads) * kStride + d);
      }
#pragma unroll
      for (int j = 0; j < kKeysPerThread; ++j) {
        k[j] = *reinterpret_cast<const float4*>(cache_tile + (column + j * kColumns) * kStride + d);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < kKeysPerThread; ++j) s[0][i][j] = Dot(q[i], k[j], s[0][i][j]);
      }
    }
  }

  __device__ void AddValues(float4 (&o)[4][kQuads]) const {
#pragma unroll 2
    for (int key = 0; key < kKeys; key += 4) {
      float p[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<float4*>(p[i]) =
            *reinterpret_cast<const float4*>(probabilities + (row_thread + i * kRowThreads) * kProbStride + key);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          const float4 v =
              *reinterpret_cast<const float4*>(cache_tile + (key + k) * kStride + (j * kColumns + column) * 4);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            o[i][j].x = fmaf(p[i][k], v.x, o[i][j].x);
            o[i][j].y = fmaf(p[i][k], v.y, o[i][j].y);
            o[i][j].z = fmaf(p[i][k], v.z, o[i][j].z);
            o[i][j].w = fmaf(p[i][k], v.w, o[i][j].w);
          }
        }
      }
    }
  }

  // Rows: TileRows<>, or a class derived from it with VisibleKeys of its own.
  template <typename Rows>
  __device__ void Run(const WorkTile& /*tile*/, const Rows& rows) {
    const char* const key_cache = HeadStart(params, params.k_cache, rows.kv_head);
    const char* const value_cache = HeadStart(params, params.v_cache, rows.kv_head);
    const LogitTransform transform(params, rows.kv_head);

    float4 o[4][kQuads] = {};
    AttentionState state[4];
    int first_key[4], last_key[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state[i] = {-INFINITY, 0.0f};
      rows.VisibleKeys(row_thread + i * kRowThreads, &first_key[i], &last_key[i]);
    }
    LoadQuery(rows);
    for (int tile = rows.key_begin / kKeys; tile * kKeys < rows.key_end; ++tile) {
      __syncthreads();
      if (thread < kKeys) {
        const int position = tile * kKeys + thread;
        const bool seen = position >= rows.key_begin && position < rows.key_end;
        offsets[thread] = seen ? KeyOffset(params, rows.seq, position) : -1;
      }
      __syncthreads();
      LoadTile(key_cache);
      __syncthreads();
      float s[1][4][kKeysPerThread];
      Scores(s);
      transform.Transform<SoftCap::kExact>(s);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float new_max = state[i].max;
#pragma unroll
        for (int j = 0; j < kKeysPerThread; ++j) {
          const int position = tile * kKeys + column + j * kColumns;
          if (position > last_key[i] || position < first_key[i]) s[0][i][j] = -INFINITY;
          new_max = fmaxf(new_max, s[0][i][j]);
        }
#pragma unroll
        for (int step = 1; step < kColumns; step *= 2) {
          new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, step));
        }
        // NOTE: both products are rounded, so that the factor is exactly 1 where row_max stays. Fused with the
        // subtraction, one product would leave its rounding error behind, once for each key tile.
        const float shift = new_max == -INFINITY ? 0.0f : __fmul_rn(new_max, transform.to_log2);
        const float rescale = Exp2(__fmul_rn(state[i].max, transform.to_log2) - shift);
        state[i].max = new_max;
        state[i].sum *= rescale;
#pragma unroll
        for (int j = 0; j < kKeysPerThread; ++j) {
          const float p = Exp2(fmaf(s[0][i][j], transform.to_log2, -shift));
          state[i].sum += p;
          probabilities[(row_thread + i * kRowThreads) * kProbStride + column + j * kColumns] = p;
        }
#pragma unroll
        for (int j = 0; j < kQuads; ++j) {
          o[i][j].x *= rescale;
          o[i][j].y *= rescale;
          o[i][j].z *= rescale;
          o[i][j].w *= rescale;
        }
      }
      __syncthreads();  // K has been read; the probabilities are written
      LoadTile(value_cache);
      __syncthreads();
      AddValues(o);
    }

    float* const out = static_cast<float*>(params.out);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_thread + i * kRowThreads;
#pragma unroll
      for (int step = 1; step < kColumns; step *= 2) state[i].sum += __shfl_xor_sync(~0u, state[i].sum, step);
      if (row >= rows.count) continue;
      const RowNormalization norm = transform.Normalize(state[i], rows.Head(row));
      const int64_t head_row = rows.HeadRow(row);
      if (params.lse != nullptr && column == 0) params.lse[head_row] = norm.lse;
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
        const int d = (j * kColumns + column) * 4;
        if (d >= params.head_dim) continue;
        const float f = norm.factor;
        const float4 x = make_float4(o[i][j].x * f, o[i][j].y * f, o[i][j].z * f, o[i][j].w * f);
        *reinterpret_cast<float4*>(out + head_row * params.head_dim + d) =
            norm.empty ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : x;
      }
    }
  }
};

template <int kDim>
__global__ void __launch_bounds__(SimtWorkTile<kDim>::kThreads)
    PrefillSimtKernel(const __grid_constant__ PagedAttentionParams params) {
  extern __shared__ __align__(1024) char shared[];
  RunWorkTile<SimtWorkTile<kDim>, float, /*kRepeats=*/true>(params, shared);
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SIMT_CUH_
