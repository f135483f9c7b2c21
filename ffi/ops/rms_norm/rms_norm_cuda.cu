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
constexpr int kKept = 4;               // vectors of an aligned row that a thread keeps between its two passes
constexpr int kShortRow = 32 * kKept;  // vectors that a warp streams alone

// What a thread keeps is 16 bytes in four registers: as elements of 16 bits it would take eight.
template <typename T>
__device__ __forceinline__ Vector<T> Elements(const uint4& bytes) {
  return *reinterpret_cast<const Vector<T>*>(&bytes);
}
template <typename T>
__device__ __forceinline__ uint4 Bytes(const Vector<T>& vector) {
  return *reinterpret_cast<const uint4*>(&vector);
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kMaxRmsNormThreads, 2) RmsNormKernel(const __grid_constant__ RmsNormParams p) {
  using V = Vector<T>;
  __shared__ float shared[kMaxRmsNormThreads / 32];
  const T* const x = static_cast<const T*>(p.x);
  const T* const residual = static_cast<const T*>(p.residual);
  const T* const weight = static_cast<const T*>(p.weight);
  T* const out = static_cast<T*>(p.out);
  T* const sum = static_cast<T*>(p.sum);
  const int64_t vectors = (p.size + V::kSize - 1) / V::kSize;
  const RmsNormWeight how = {p.weight_offset, p.round_once};
  const auto add = [](V value, const V& added) {
#pragma unroll
    for (int j = 0; j < V::kSize; ++j) {
      value.values[j] = static_cast<T>(static_cast<float>(value.values[j]) + static_cast<float>(added.values[j]));
    }
    return value;
  };
  // Vector k of those that the thread keeps, where the row has it.
  const auto for_kept = [&](const auto& body) {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const int64_t i = threadIdx.x + static_cast<int64_t>(k) * blockDim.x;
      if (i < vectors) body(k, i);
    }
  };
  const int64_t first_not_kept = threadIdx.x + (kAligned ? static_cast<int64_t>(kKept) * blockDim.x : 0);
  uint4 factors[kKept];
  if constexpr (kAligned) for_kept([&](int k, int64_t i) { factors[k] = reinterpret_cast<const uint4*>(weight)[i]; });
  AllowDependentLaunch();
  WaitForPreviousKernel();
  const int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t row = block * blockDim.y + threadIdx.y;
  if (row >= p.num_rows) return;
  const int64_t at = row * p.size;
  const auto load = [&](int64_t i) {
    const V value = LoadVector(x + at, i, p.size, kAligned);
    return residual == nullptr ? value : add(value, LoadVector(residual + at, i, p.size, kAligned));
  };
  uint4 kept[kKept];
  float squares = 0.0f;
  if constexpr (kAligned) {
    for_kept([&](int k, int64_t i) { kept[k] = reinterpret_cast<const uint4*>(x + at)[i]; });
    if (residual != nullptr) {
      // All loads before the first sum, which waits for its operands.
      uint4 added[kKept];
      for_kept([&](int k, int64_t i) { added[k] = reinterpret_cast<const uint4*>(residual + at)[i]; });
      for_kept([&](int k, int64_t) { kept[k] = Bytes<T>(add(Elements<T>(kept[k]), Elements<T>(added[k]))); });
    }
    for_kept([&](int k, int64_t i) {
      if (sum != nullptr) reinterpret_cast<uint4*>(sum + at)[i] = kept[k];
      AddSquares(Elements<T>(kept[k]), &squares);
    });
  }
#pragma unroll 1
  for (int64_t i = first_not_kept; i < vectors; i += blockDim.x) {
    const V value = load(i);
    if (sum != nullptr) StoreVector(sum + at, i, p.size, kAligned, value);
    AddSquares(value, &squares);
  }
  const float scale = RmsNormScale(CtaSum(squares, shared), p.size, p.eps);
  if constexpr (kAligned) {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      KeepWhole(&kept[k]);
      KeepWhole(&factors[k]);
    }
    for_kept([&](int k, int64_t i) {
      reinterpret_cast<V*>(out + at)[i] = RmsNormVector(Elements<T>(kept[k]), scale, Elements<T>(factors[k]), how);
    });
  }
#pragma unroll 1
  for (int64_t i = first_not_kept; i < vectors; i += blockDim.x) {
    const V factor = LoadVector(weight, i, p.size, kAligned);
    StoreVector(out + at, i, p.size, kAligned, RmsNormVector(load(i), scale, factor, how));
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
  const int64_t blocks = (p.num_rows + threads.y - 1) / threads.y;
  constexpr int64_t kMaxColumns = int64_t{1} << 30;
  const dim3 grid(static_cast<unsigned>(std::min(blocks, kMaxColumns)),
                  static_cast<unsigned>((blocks + kMaxColumns - 1) / kMaxColumns));
  uintptr_t bits = static_cast<uintptr_t>(p.size * static_cast<int64_t>(sizeof(T)));
  for (const void* pointer :
       {p.x, p.residual, p.weight, static_cast<const void*>(p.out), static_cast<const void*>(p.sum)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  const auto kernel = bits % 16 == 0 ? RmsNormKernel<T, true> : RmsNormKernel<T, false>;
  return LaunchKernel(kernel, grid, threads, /*shared_bytes=*/0, stream, order, p);
}

}  // namespace

Status LaunchRmsNorm(const RmsNormParams& params, Stream stream, LaunchOrder order) {
  if (params.num_rows == 0 || params.size == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "rms_norm: x",
                       [&](auto zero) { return Launch<decltype(zero)>(params, stream, order); });
}

}  // namespace xla_gpu
