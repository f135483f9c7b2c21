// The RMS norm of a row that a CTA, or a warp, holds in vectors. rms_norm, all_reduce_add_rms_norm and the norms of
// query and key heads compute it here, with one order of sums and one place where each result is rounded.
#ifndef XLA_GPU_DEVICE_RMS_NORM_CUH_
#define XLA_GPU_DEVICE_RMS_NORM_CUH_

#include "ffi/device/vector.cuh"

namespace xla_gpu {

// The sum of `value` over a warp, in every lane.
__device__ __forceinline__ float WarpSum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
  return value;
}

// The sum of `value` over the CTA's threads of one threadIdx.y, in an order that depends on blockDim.x alone. `shared`
// has a float a warp. With blockDim.x = 32 the CTA may hold several rows.
__device__ __forceinline__ float CtaSum(float value, float* shared) {
  value = WarpSum(value);
  if (blockDim.x == 32) return value;
  __syncthreads();  // the row before has been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) sum += shared[warp];
  return sum;
}

// Adds the squares of a vector's elements; those past the row's end are 0.
template <typename T>
__device__ __forceinline__ void AddSquares(const Vector<T>& vector, float* squares) {
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) {
    const float value = static_cast<float>(vector.values[j]);
    *squares += value * value;
  }
}

// 1 / sqrt(mean of squares + eps)
__device__ __forceinline__ float RmsNormScale(float squares, int64_t size, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(size) + eps);
}

// How a normed element is multiplied by the weight.
struct RmsNormWeight {
  float offset = 0.0f;      // added to the weight: 1 in Gemma's models
  bool round_once = false;  // Gemma multiplies in float32 and rounds once; Llama rounds before it multiplies, too
};

template <typename T>
__device__ __forceinline__ T RmsNormElement(T value, float scale, T weight, const RmsNormWeight& how) {
  const float normed = static_cast<float>(value) * scale;
  const float factor = static_cast<float>(weight) + how.offset;
  return static_cast<T>((how.round_once ? normed : static_cast<float>(static_cast<T>(normed))) * factor);
}

template <typename T>
__device__ __forceinline__ Vector<T> RmsNormVector(const Vector<T>& values, float scale, const Vector<T>& weights,
                                                   const RmsNormWeight& how) {
  Vector<T> result;
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) {
    result.values[j] = RmsNormElement(values.values[j], scale, weights.values[j], how);
  }
  return result;
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_RMS_NORM_CUH_
