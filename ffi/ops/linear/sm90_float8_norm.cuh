// A norm in front of the kernel of sm_90a for float8 weights and more than 32 rows: it writes normed rows as that
// kernel multiplies them, two terms of float8, so that no kernel between them does.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FLOAT8_NORM_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FLOAT8_NORM_CUH_

#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/launch.cuh"
#include "ffi/device/launch_order.h"
#include "ffi/device/rms_norm.cuh"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_clusters.cuh"
#include "ffi/ops/linear/sm90_float8_kernel.cuh"
#include "ffi/ops/linear/sm90_float8_x.cuh"
#include "ffi/ops/rms_norm/rms_norm.h"

namespace xla_gpu::linear {

inline constexpr int kNormVectors = 4;        // of eight values of a row, of a thread
inline constexpr int kMostNormThreads = 512;  // so a row has 16 384 values at most

// A CTA norms a row and splits it; `terms` and `factors` as of SplitRowsKernel, zeros past the rows of x. The order of
// sums is rms_norm's, and so are the bits. A warp's vectors lie side by side: 256 values have one power of two.
template <int kVectors>
__global__ void __launch_bounds__(kMostNormThreads, 2)
    NormSplitRowsKernel(const __grid_constant__ RmsNormParams p, char* terms, float* factors) {
#if XLA_GPU_HAS_WGMMA
  using T = __nv_bfloat16;
  using V = Vector<T>;
  __shared__ float shared[kMostNormThreads / 32];
  const int vectors = static_cast<int>(p.size) / V::kSize, row = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const RmsNormWeight how = {p.weight_offset, p.round_once};
  const auto vector = [](int j) { return static_cast<int>(threadIdx.x + j * blockDim.x); };
  uint4 weights[kVectors] = {}, values[kVectors] = {};
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (vector(j) < vectors) weights[j] = static_cast<const uint4*>(p.weight)[vector(j)];
  }
  AllowDependentLaunch();
  WaitForPreviousKernel();
  const bool exists = row < p.num_rows;
  const auto* const from = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + row * p.size);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (exists && vector(j) < vectors) values[j] = from[vector(j)];
  }
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) AddSquares(reinterpret_cast<const V&>(values[j]), &squares);
  const float norm = RmsNormScale(CtaSum(squares, shared), p.size, p.eps);
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (vector(j) - lane >= vectors) continue;  // of the whole warp
    const V normed =
        RmsNormVector(reinterpret_cast<const V&>(values[j]), norm, reinterpret_cast<const V&>(weights[j]), how);
    const auto& bytes = reinterpret_cast<const uint4&>(normed);
    uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    float scale;
    const float inverse = FindScaleOfWarp(words, &scale);
#pragma unroll
    for (uint32_t& word : words) word = ScalePair(word, scale);
    uint2 high, low;
    SplitFour(words[0], words[1], &high.x, &low.x);
    SplitFour(words[2], words[3], &high.y, &low.y);
    if (vector(j) < vectors) {
      char* const to = terms + row * p.size + vector(j) * V::kSize;
      *reinterpret_cast<uint2*>(to) = high;
      *reinterpret_cast<uint2*>(to + kSplitRows * p.size) = low;
    }
    if (lane == 0) factors[vector(j) / 32 * kSplitRows + row] = inverse;
  }
#endif
}

// Whether a norm is launched that splits its rows for the product behind it. With up to 32 rows the product's own warps
// do that beside its first loads, which is faster.
inline Status NormSplitsRows(const RmsNormParams& norm, const LinearParams& linear, bool* splits) {
  *splits = false;
  const auto bits = reinterpret_cast<uintptr_t>(norm.x) | reinterpret_cast<uintptr_t>(norm.weight);
  constexpr int kMostValues = kMostNormThreads * kNormVectors * Vector<__nv_bfloat16>::kSize;
  if (norm.weight == nullptr || norm.residual != nullptr || bits % 16 != 0 || norm.size > kMostValues ||
      linear.rows <= 32 || linear.rows > kLinearMaxRows || linear.n == 0 || linear.dtype != DType::kBF16 ||
      linear.format != WeightFormat::kFloat8 || linear.scale == WeightScale::kBlock) {
    return Status::Ok();
  }
  using Config = Float8Traits<kLinearMaxRows>;
  return RunsSm90a(Float8Sm90Kernel<Config>, Config::kThreads, splits);
}

inline Status LaunchNormSplitRows(const RmsNormParams& norm, const LinearParams& linear, Stream stream) {
  constexpr int kOfWarp = 32 * kNormVectors;
  const int vectors = static_cast<int>(norm.size) / Vector<__nv_bfloat16>::kSize;
  const auto threads = static_cast<unsigned>((vectors + kOfWarp - 1) / kOfWarp * 32);
  auto* const terms = static_cast<char*>(linear.scratch);
  return LaunchKernel(NormSplitRowsKernel<kNormVectors>, dim3(kLinearMaxRows), dim3(threads),
                      /*shared_bytes=*/0, stream, LaunchOrder::kFirst, norm, terms,
                      reinterpret_cast<float*>(terms + SplitTermBytes(linear.k)));
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FLOAT8_NORM_CUH_
