// float32 on CUDA cores: for tests and small models. A warp computes one feature (with an activation its gate and its
// factor) for eight rows at a time.
#ifndef XLA_GPU_OPS_LINEAR_SIMT_F32_CUH_
#define XLA_GPU_OPS_LINEAR_SIMT_F32_CUH_

#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/float8.cuh"
#include "ffi/ops/linear/args.h"
#include "ffi/ops/linear/epilogue.cuh"

namespace xla_gpu::linear {

inline constexpr int kSimtThreads = 256;
inline constexpr int kSimtRows = 8;

// The k-th value of a weight row, without a scale of the whole row.
__device__ inline float WeightValue(const LinearArgs& args, WeightFormat format, int row, int k) {
  const char* at = args.weight + row * args.weight_row_bytes;
  const auto* scales = static_cast<const float*>(args.weight_scale);
  if (format == WeightFormat::kPlain) return reinterpret_cast<const float*>(at)[k];
  if (format == WeightFormat::kInt8) return static_cast<float>(reinterpret_cast<const signed char*>(at)[k]);
  const int group = k / static_cast<int>(kQuantGroup);
  if (format == WeightFormat::kFloat8) {
    const float value = Float8ToFloat4<true>(static_cast<unsigned char>(at[k])).x;
    if (args.scale != WeightScale::kBlock) return value;
    return value * scales[static_cast<int64_t>(row / kQuantGroup) * args.groups + group];
  }
  // Nibbles of a word hold values 0, 2, 4, 6, 1, 3, 5, 7.
  const int nibble = k % 2 * 4 + k % 8 / 2;
  const unsigned word = reinterpret_cast<const unsigned*>(at)[k / 8];
  const int value = static_cast<int>(word >> (4 * nibble) & 0xf);
  const int64_t index = static_cast<int64_t>(row) * args.groups + group;
  const int zero_point = args.zero_point == nullptr ? 8 : args.zero_point[index];
  return zero_point > 127 ? NAN : static_cast<float>(value - zero_point) * scales[index];
}

__global__ void __launch_bounds__(kSimtThreads)
    LinearSimtF32Kernel(const __grid_constant__ LinearArgs args, int64_t rows, WeightFormat format) {
  const int lane = threadIdx.x % 32;
  const int out_features = args.activation == Activation::kNone ? args.n : args.n / 2;
  const int features = args.n / out_features;
  const int64_t feature = static_cast<int64_t>(blockIdx.x) * (kSimtThreads / 32) + threadIdx.x / 32;
  if (feature >= out_features) return;
  for (int64_t first = static_cast<int64_t>(blockIdx.y) * kSimtRows; first < rows;
       first += static_cast<int64_t>(gridDim.y) * kSimtRows) {
    float sums[2][kSimtRows] = {};
    for (int part = 0; part < features; ++part) {
      const int weight_row = static_cast<int>(feature) + part * out_features;
      for (int k = lane; k < args.k; k += 32) {
        const float weight = WeightValue(args, format, weight_row, k);
#pragma unroll
        for (int r = 0; r < kSimtRows; ++r) {
          if (first + r < rows) {
            float& sum = part == 0 ? sums[0][r] : sums[1][r];
            sum = fmaf(static_cast<const float*>(args.x)[(first + r) * args.k + k], weight, sum);
          }
        }
      }
    }
#pragma unroll
    for (auto& part : sums) {
#pragma unroll
      for (float& sum : part) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      }
    }
#pragma unroll
    for (int r = 0; r < kSimtRows; ++r) {
      if (lane != r || first + r >= rows) continue;
      const int row = static_cast<int>(feature);
      float value = Feature<float>(args, sums[0][r], row);
      if (args.activation != Activation::kNone) {
        value = ActivationOf<float>(args.activation, value) * Feature<float>(args, sums[1][r], row + out_features);
      }
      StoreResult<float>(args, value, first + r, row, out_features);
    }
  }
}

inline Status LaunchSimtF32(const LinearArgs& args, int64_t rows, WeightFormat format, Stream stream) {
  constexpr int64_t kWarps = kSimtThreads / 32;
  const int64_t out_features = args.activation == Activation::kNone ? args.n : args.n / 2;
  const dim3 grid(static_cast<unsigned>((out_features + kWarps - 1) / kWarps),
                  static_cast<unsigned>(std::min<int64_t>((rows + kSimtRows - 1) / kSimtRows, 65535)));
  LinearSimtF32Kernel<<<grid, kSimtThreads, 0, stream>>>(args, rows, format);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SIMT_F32_CUH_
