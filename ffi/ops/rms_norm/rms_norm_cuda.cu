// rms_norm on a GPU: limited by the bandwidth for the rows. A CTA streams a row, or for short rows, such as those of
// heads, each of its warps does.
#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/dispatch.cuh"
#include "ffi/device/launch.cuh"
#include "ffi/device/rms_norm.cuh"
#include "ffi/ops/rms_norm/rms_norm.h"

namespace xla_gpu {
namespace {

constexpr int kMaxRmsNormThreads = 512;
constexpr int kRowsOfShort = 8;
constexpr int kKept = 4;               // vectors of a row that a thread keeps between its two passes
constexpr int kShortRow = 32 * kKept;  // vectors that a warp streams alone

template <typename T>
__global__ void __launch_bounds__(kMaxRmsNormThreads)
    RmsNormKernel(const __grid_constant__ RmsNormParams p, bool aligned) {
  using V = Vector<T>;
  __shared__ float shared[kMaxRmsNormThreads / 32];
  const T* const x = static_cast<const T*>(p.x);
  const T* const residual = static_cast<const T*>(p.residual);
  const T* const weight = static_cast<const T*>(p.weight);
  T* const out = static_cast<T*>(p.out);
  T* const sum = static_cast<T*>(p.sum);
  const int64_t vectors = (p.size + V::kSize - 1) / V::kSize;
  const RmsNormWeight how = {p.weight_offset, p.round_once};
  AllowDependentLaunch();
  WaitForPreviousKernel();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; row < p.num_rows;
       row += static_cast<int64_t>(gridDim.x) * blockDim.y) {
    const int64_t at = row * p.size;
    const auto load = [&](int64_t i) {
      V value = LoadVector(x + at, i, p.size, aligned);
      if (residual == nullptr) return value;
      const V added = LoadVector(residual + at, i, p.size, aligned);
#pragma unroll
      for (int j = 0; j < V::kSize; ++j) {
        value.values[j] = static_cast<T>(static_cast<float>(value.values[j]) + static_cast<float>(added.values[j]));
      }
      return value;
    };
    V kept[kKept];
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t i = threadIdx.x + static_cast<int64_t>(k) * blockDim.x;
      if (i >= vectors) break;
      kept[k] = load(i);
    }
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t i = threadIdx.x + static_cast<int64_t>(k) * blockDim.x;
      if (i >= vectors) break;
      if (sum != nullptr) StoreVector(sum + at, i, p.size, aligned, kept[k]);
      AddSquares(kept[k], &squares);
    }
    for (int64_t i = threadIdx.x + static_cast<int64_t>(kKept) * blockDim.x; i < vectors; i += blockDim.x) {
      const V value = load(i);
      if (sum != nullptr) StoreVector(sum + at, i, p.size, aligned, value);
      AddSquares(value, &squares);
    }
    const float scale = RmsNormScale(CtaSum(squares, shared), p.size, p.eps);
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t i = threadIdx.x + static_cast<int64_t>(k) * blockDim.x;
      if (i >= vectors) break;
      const V factor = LoadVector(weight, i, p.size, aligned);
      StoreVector(out + at, i, p.size, aligned, RmsNormVector(kept[k], scale, factor, how));
    }
    for (int64_t i = threadIdx.x + static_cast<int64_t>(kKept) * blockDim.x; i < vectors; i += blockDim.x) {
      const V factor = LoadVector(weight, i, p.size, aligned);
      StoreVector(out + at, i, p.size, aligned, RmsNormVector(load(i), scale, factor, how));
    }
  }
}

template <typename T>
Status Launch(const RmsNormParams& p, Stream stream, LaunchOrder order) {
  const int64_t vectors = (p.size + Vector<T>::kSize - 1) / Vector<T>::kSize;
  // NOTE: the order of sums follows from the row's size alone: not from the number of rows.
  const bool is_short = vectors <= kShortRow;
  const auto width = static_cast<unsigned>(
      is_short ? 32 : std::min<int64_t>((vectors + kShortRow - 1) / kShortRow * 32, kMaxRmsNormThreads));
  const dim3 threads(width, is_short ? kRowsOfShort : 1);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((p.num_rows + threads.y - 1) / threads.y, 1 << 16));
  uintptr_t bits = static_cast<uintptr_t>(p.size * static_cast<int64_t>(sizeof(T)));
  for (const void* pointer :
       {p.x, p.residual, p.weight, static_cast<const void*>(p.out), static_cast<const void*>(p.sum)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  return LaunchKernel(RmsNormKernel<T>, dim3(blocks), threads, /*shared_bytes=*/0, stream, order, p, bits % 16 == 0);
}

}  // namespace

Status LaunchRmsNorm(const RmsNormParams& params, Stream stream, LaunchOrder order) {
  if (params.num_rows == 0 || params.size == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "rms_norm: x",
                       [&](auto zero) { return Launch<decltype(zero)>(params, stream, order); });
}

}  // namespace xla_gpu
