// silu_and_mul and gelu_and_mul on a GPU: limited by the bandwidth for three elements a result.
#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/activation.cuh"
#include "ffi/device/dispatch.cuh"
#include "ffi/device/vector.cuh"
#include "ffi/ops/silu_and_mul/silu_and_mul.h"

namespace xla_gpu {
namespace {

constexpr int kActivationThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kActivationThreads)
    ActivationAndMulKernel(const __grid_constant__ ActivationAndMulParams p, bool aligned) {
  using V = Vector<T>;
  const int64_t vectors = (p.size + V::kSize - 1) / V::kSize;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kActivationThreads + threadIdx.x;
  if (i >= vectors) return;
  const bool silu = p.activation == GatedActivation::kSilu;
  for (int64_t row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    const T* const x = static_cast<const T*>(p.x) + row * 2 * p.size;
    const V gate = LoadVector(x, i, p.size, aligned);
    const V up = LoadVector(x + p.size, i, p.size, aligned);
    V result;
#pragma unroll
    for (int j = 0; j < V::kSize; ++j) {
      const float value = static_cast<float>(gate.values[j]);
      const T active = static_cast<T>(SiluOrGeluTanh<T>(value, silu));
      result.values[j] = static_cast<T>(static_cast<float>(active) * static_cast<float>(up.values[j]));
    }
    StoreVector(static_cast<T*>(p.out) + row * p.size, i, p.size, aligned, result);
  }
}

template <typename T>
Status Launch(const ActivationAndMulParams& p, Stream stream) {
  const int64_t vectors = (p.size + Vector<T>::kSize - 1) / Vector<T>::kSize;
  const int64_t columns = (vectors + kActivationThreads - 1) / kActivationThreads;
  if (columns >= int64_t{1} << 31) {
    return Status::InvalidArgument("silu_and_mul: x: expected fewer than 2^40 elements in a row");
  }
  const dim3 blocks(static_cast<unsigned>(columns), static_cast<unsigned>(std::min<int64_t>(p.num_rows, 65535)));
  const uintptr_t bits = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.out) |
                         static_cast<uintptr_t>(p.size * static_cast<int64_t>(sizeof(T)));
  ActivationAndMulKernel<T><<<blocks, kActivationThreads, /*shared_mem=*/0, stream>>>(p, bits % 16 == 0);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace

Status LaunchActivationAndMul(const ActivationAndMulParams& params, Stream stream) {
  if (params.num_rows == 0 || params.size == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "silu_and_mul: x",
                       [&](auto zero) { return Launch<decltype(zero)>(params, stream); });
}

}  // namespace xla_gpu
