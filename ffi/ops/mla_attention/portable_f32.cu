// mla_attention in float32 by fused multiply-adds, with float32's accuracy, on every GPU.
#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/ops/mla_attention/portable.cuh"

namespace xla_gpu::mla {
namespace {

// At most 99 KiB of shared memory. Scores: a thread has one row and one key. Values: it has all rows and two columns.
struct MlaSimtTile {
  static constexpr int kRows = 16, kKeys = 16;
  static constexpr int kThreads = kRows * kKeys;
  static_assert(kThreads * 2 == kMaxMlaValueDim);

  // Rows are padded by 16 bytes, so that neighbours begin in other banks.
  static constexpr int kMaxStride = static_cast<int>(kMaxMlaHeadDim) + 4;
  static constexpr int kSharedBytes =
      ((kRows + kKeys) * kMaxStride + kRows * kKeys + kRows) * static_cast<int>(sizeof(float)) + kKeys * 8;
  static_assert(kSharedBytes <= 99 * 1024);

  using Scheduler = prefill::SingleTileScheduler<kThreads, kRows>;
  static_assert(sizeof(typename Scheduler::Storage) <= kSharedBytes);

  const PortableParams& params;
  const int stride;
  int64_t* const offsets;   // [kKeys]
  float* const numerators;  // [kRows][kKeys]
  float* const factors;     // [kRows]
  float* const query;       // [kRows][stride]
  float* const keys;        // [kKeys][stride]
  const int thread = static_cast<int>(threadIdx.x);

  __device__ MlaSimtTile(const PortableParams& params, char* shared)
      : params(params),
        stride(params.key_dim + 4),
        offsets(reinterpret_cast<int64_t*>(shared)),
        numerators(reinterpret_cast<float*>(shared + kKeys * 8)),
        factors(numerators + kRows * kKeys),
        query(factors + kRows),
        keys(query + kRows * kMaxStride) {}

  // `source_of(row)` is null for a row of zeros.
  template <typename SourceOf>
  __device__ void LoadRows(float* target, int rows, const SourceOf& source_of) const {
    const int vectors = params.key_dim / 4;
    for (int i = thread; i < rows * vectors; i += kThreads) {
      const int row = i / vectors, vector = i - row * vectors;
      const float* const source = source_of(row);
      const bool read = source != nullptr;
      CopyAsync16(SharedAddress(target + row * stride + vector * 4),
                  read ? source + vector * 4 : static_cast<const float*>(params.attention.query), read);
    }
  }

  __device__ float Score(int row, int key) const {
    const float* const q = query + row * stride;
    const float* const k = keys + key * stride;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int d = 0; d < params.key_dim; d += 4) {
      const float4 a = *reinterpret_cast<const float4*>(q + d), b = *reinterpret_cast<const float4*>(k + d);
      sum.x = fmaf(a.x, b.x, sum.x);
      sum.y = fmaf(a.y, b.y, sum.y);
      sum.z = fmaf(a.z, b.z, sum.z);
      sum.w = fmaf(a.w, b.w, sum.w);
    }
    return ((sum.x + sum.y) + (sum.z + sum.w)) * params.scale_log2;
  }

  __device__ void AddValues(float2 (&o)[kRows]) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      o[row].x *= factors[row];
      o[row].y *= factors[row];
    }
    if (thread * 2 >= params.attention.head_dim) return;
#pragma unroll 1
    for (int key = 0; key < kKeys; key += 4) {
      float2 values[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) values[k] = *reinterpret_cast<const float2*>(keys + (key + k) * stride + thread * 2);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const float4 p = *reinterpret_cast<const float4*>(numerators + row * kKeys + key);
        const float p_of[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          o[row].x = fmaf(p_of[k], values[k].x, o[row].x);
          o[row].y = fmaf(p_of[k], values[k].y, o[row].y);
        }
      }
    }
  }

  __device__ void Run(const prefill::TileRows<>& rows) {
    const PagedAttentionParams& attention = params.attention;
    const auto* const all_queries = static_cast<const float*>(attention.query);
    const auto* const cache = static_cast<const float*>(attention.k_cache);
    const int my_row = thread / kKeys, my_key = thread % kKeys;
    int first_key, last_key;
    rows.VisibleKeys(my_row, &first_key, &last_key);
    RowSoftmax softmax;
    float2 o[kRows] = {};

    LoadRows(query, kRows,
             [&](int row) { return row < rows.count ? all_queries + rows.HeadRow(row) * params.key_dim : nullptr; });
    for (int tile = 0; tile * kKeys < rows.key_end; ++tile) {
      __syncthreads();
      if (thread < kKeys) {
        const int position = tile * kKeys + thread;
        offsets[thread] = position < rows.key_end ? prefill::KeyOffset(attention, rows.seq, position) : -1;
      }
      __syncthreads();
      // Keys that no row sees are zeros, so that the contents of unused slots take no part.
      LoadRows(keys, kKeys, [&](int key) { return offsets[key] >= 0 ? cache + offsets[key] : nullptr; });
      CommitAsync();
      WaitAsync<0>();
      __syncthreads();
      const float score = Score(my_row, my_key);
      float rescale;
      numerators[thread] = softmax.Update<kKeys>(tile * kKeys + my_key > last_key ? -INFINITY : score, &rescale);
      if (my_key == 0) factors[my_row] = rescale;
      __syncthreads();
      AddValues(o);
    }

    // ---- Results
    __syncthreads();
    if (my_key == 0) {
      factors[my_row] = softmax.Factor();
      if (attention.lse != nullptr && my_row < rows.count) {
        attention.lse[rows.HeadRow(my_row)] = softmax.state.LogSumExp();
      }
    }
    __syncthreads();
    if (thread * 2 >= attention.head_dim) return;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= rows.count) break;
      float* const out = static_cast<float*>(attention.out) + rows.HeadRow(row) * attention.head_dim;
      *reinterpret_cast<float2*>(out + thread * 2) = make_float2(o[row].x * factors[row], o[row].y * factors[row]);
    }
  }
};

__global__ void __launch_bounds__(MlaSimtTile::kThreads) MlaSimtKernel(const __grid_constant__ PortableParams params) {
  extern __shared__ __align__(1024) char shared[];
  RunPortableTile<MlaSimtTile, float>(params, shared);
}

}  // namespace

Status LaunchPortableF32(const MlaAttentionParams& params, Stream stream) {
  return LaunchPortable<MlaSimtTile>(MlaSimtKernel, params, stream);
}

}  // namespace xla_gpu::mla
