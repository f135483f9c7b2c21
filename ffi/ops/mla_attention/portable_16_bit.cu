// mla_attention in float16 and bfloat16 with mma.sync, for sm_80 and up, and for shapes that the sm_90a kernel is not
// for.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mma.cuh"
#include "ffi/ops/mla_attention/portable.cuh"

namespace xla_gpu::mla {
namespace {

// At most 99 KiB of shared memory, the limit of a CTA on sm_86 and sm_89. Scores: a warp has 16 rows and 8 keys.
// Values: it has all rows, and 16 columns of every kWarps * 16.
template <typename T>
struct MlaMmaTile {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRowTiles = 2;  // of 16 rows
  static constexpr int kRows = kRowTiles * 16;
  static constexpr int kKeys = 32;
  static constexpr int kColumnPairs = static_cast<int>(kMaxMlaValueDim) / 16 / kWarps;  // accumulator tiles, by two
  static_assert(kRowTiles * kKeys / 8 == kWarps && kKeys == 32 && kRows % kWarps == 0);

  // Rows are padded by 16 bytes, so that the eight rows of an ldmatrix lie in different banks.
  static constexpr int kMaxRowBytes = static_cast<int>(kMaxMlaHeadDim) * 2 + 16;
  static constexpr int kScoreStride = kKeys + 4;
  static constexpr int kNumeratorBytes = kKeys * 2 + 16;  // of a row
  static constexpr int kKeyStart = kRows * kMaxRowBytes;
  static constexpr int kScoreStart = kKeyStart + kKeys * kMaxRowBytes;
  static constexpr int kNumeratorStart = kScoreStart + kRows * kScoreStride * 4;
  static constexpr int kFactorStart = kNumeratorStart + kRows * kNumeratorBytes;
  static constexpr int kOffsetStart = kFactorStart + kRows * 4;
  static constexpr int kSharedBytes = kOffsetStart + kKeys * 8;
  static_assert(kSharedBytes <= 99 * 1024 && kOffsetStart % 8 == 0);

  using Scheduler = prefill::SingleTileScheduler<kThreads, kRows>;
  static_assert(sizeof(typename Scheduler::Storage) <= kSharedBytes);

  const PortableParams& params;
  char* const shared;
  const uint32_t shared_address;
  const int row_bytes;  // of Q and keys; columns up to a multiple of 16, those behind key_dim are zeros
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  __device__ MlaMmaTile(const PortableParams& params, char* shared)
      : params(params),
        shared(shared),
        shared_address(SharedAddress(shared)),
        row_bytes((params.key_dim + 15) / 16 * 32 + 16) {}

  // Rows of key_dim elements; `source_of(row)` is null for a row of zeros.
  template <typename SourceOf>
  __device__ void LoadRows(uint32_t target, int rows, const SourceOf& source_of) const {
    const int vectors = row_bytes / 16 - 1;
    for (int i = thread; i < rows * vectors; i += kThreads) {
      const int row = i / vectors, vector = i - row * vectors;
      const char* const source = source_of(row);
      const bool read = source != nullptr && vector * 8 < params.key_dim;
      CopyAsync16(target + row * row_bytes + vector * 16,
                  read ? source + vector * 16 : static_cast<const char*>(params.attention.query), read);
    }
  }

  __device__ void Scores() const {
    const int row_tile = warp / (kKeys / 8), key_tile = warp % (kKeys / 8);
    const uint32_t q = shared_address + (row_tile * 16 + lane % 16) * row_bytes + lane / 16 * 16;
    const uint32_t k = shared_address + kKeyStart + (key_tile * 8 + lane % 8) * row_bytes + lane / 8 * 16;
    float even[4] = {}, odd[4] = {};
    const int steps = row_bytes / 32;
#pragma unroll 2
    for (int step = 0; step < steps; step += 2) {
      uint32_t a[4], b[4];
      LoadMatrix4(b, k + step * 32);  // of two steps
      LoadMatrix4(a, q + step * 32);
      Mma16x8x16<T>(even, a, b[0], b[1]);
      if (step + 1 == steps) break;
      LoadMatrix4(a, q + (step + 1) * 32);
      Mma16x8x16<T>(odd, a, b[2], b[3]);
    }
    float* const scores = reinterpret_cast<float*>(shared + kScoreStart) + (row_tile * 16 + lane / 4) * kScoreStride +
                          key_tile * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i / 2 * 8 * kScoreStride + i % 2] = (even[i] + odd[i]) * params.scale_log2;
  }

  __device__ void AddValues(float (&o)[kRowTiles][kColumnPairs * 2][4]) const {
    const float* const factors = reinterpret_cast<const float*>(shared + kFactorStart) + lane / 4;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const float factor[2] = {factors[m * 16], factors[m * 16 + 8]};
#pragma unroll
      for (int d = 0; d < kColumnPairs * 2; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][d][i] *= factor[i / 2];
      }
    }
    const uint32_t numerators = shared_address + kNumeratorStart + lane % 16 * kNumeratorBytes + lane / 16 * 16;
    const uint32_t values = shared_address + kKeyStart + lane % 16 * row_bytes + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) LoadMatrix4(a[m], numerators + m * 16 * kNumeratorBytes + step * 32);
#pragma unroll
      for (int j = 0; j < kColumnPairs; ++j) {
        const int column = (j * kWarps + warp) * 16;
        if (column >= params.attention.head_dim) break;
        uint32_t b[4];
        LoadMatrix4Transposed(b, values + step * 16 * row_bytes + column * 2);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          Mma16x8x16<T>(o[m][j * 2], a[m], b[0], b[1]);
          Mma16x8x16<T>(o[m][j * 2 + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ void Run(const prefill::TileRows<>& rows) {
    const PagedAttentionParams& attention = params.attention;
    const T* const query = static_cast<const T*>(attention.query);
    const T* const cache = static_cast<const T*>(attention.k_cache);
    int64_t* const offsets = reinterpret_cast<int64_t*>(shared + kOffsetStart);
    float* const factors = reinterpret_cast<float*>(shared + kFactorStart);
    constexpr int kWarpRows = kRows / kWarps;  // whose softmax a warp computes
    RowSoftmax softmax[kWarpRows];
    float o[kRowTiles][kColumnPairs * 2][4] = {};

    LoadRows(shared_address, kRows, [&](int row) {
      return row < rows.count ? reinterpret_cast<const char*>(query + rows.HeadRow(row) * params.key_dim) : nullptr;
    });
    for (int tile = 0; tile * kKeys < rows.key_end; ++tile) {
      __syncthreads();
      if (thread < kKeys) {
        const int position = tile * kKeys + thread;
        offsets[thread] = position < rows.key_end ? prefill::KeyOffset(attention, rows.seq, position) : -1;
      }
      __syncthreads();
      // Keys that no row sees are zeros, so that the contents of unused slots take no part.
      LoadRows(shared_address + kKeyStart, kKeys, [&](int key) {
        return offsets[key] >= 0 ? reinterpret_cast<const char*>(cache + offsets[key]) : nullptr;
      });
      CommitAsync();
      WaitAsync<0>();
      __syncthreads();
      Scores();
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kWarpRows; ++i) {
        const int row = warp * kWarpRows + i;
        int first_key, last_key;
        rows.VisibleKeys(row, &first_key, &last_key);
        const float score = reinterpret_cast<const float*>(shared + kScoreStart)[row * kScoreStride + lane];
        float rescale;
        const float numerator =
            softmax[i].template Update<32>(tile * kKeys + lane > last_key ? -INFINITY : score, &rescale);
        reinterpret_cast<T*>(shared + kNumeratorStart + row * kNumeratorBytes)[lane] = static_cast<T>(numerator);
        if (lane == 0) factors[row] = rescale;
      }
      __syncthreads();
      AddValues(o);
    }

    // ---- Results
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      const int row = warp * kWarpRows + i;
      if (lane != 0) continue;
      factors[row] = softmax[i].Factor();
      if (attention.lse != nullptr && row < rows.count) {
        attention.lse[rows.HeadRow(row)] = softmax[i].state.LogSumExp();
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = m * 16 + h * 8 + lane / 4;
        if (row >= rows.count) continue;
        const float factor = factors[row];
        T* const out = static_cast<T*>(attention.out) + rows.HeadRow(row) * attention.head_dim + lane % 4 * 2;
#pragma unroll
        for (int d = 0; d < kColumnPairs * 2; ++d) {
          const int column = (d / 2 * kWarps + warp) * 16 + d % 2 * 8;
          if (column >= attention.head_dim) continue;
          *reinterpret_cast<uint32_t*>(out + column) = Pack<T>(o[m][d][h * 2] * factor, o[m][d][h * 2 + 1] * factor);
        }
      }
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(MlaMmaTile<T>::kThreads) MlaMmaKernel(const __grid_constant__ PortableParams params) {
  extern __shared__ __align__(1024) char shared[];
  RunPortableTile<MlaMmaTile<T>, T>(params, shared);
}

}  // namespace

Status LaunchPortable16Bit(const MlaAttentionParams& params, Stream stream) {
  if (params.dtype == DType::kF16) return LaunchPortable<MlaMmaTile<__half>>(MlaMmaKernel<__half>, params, stream);
  return LaunchPortable<MlaMmaTile<__nv_bfloat16>>(MlaMmaKernel<__nv_bfloat16>, params, stream);
}

}  // namespace xla_gpu::mla
