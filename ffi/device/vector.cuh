// 16 bytes of a row's elements, loaded and stored together where the row allows it.
#ifndef XLA_GPU_DEVICE_VECTOR_CUH_
#define XLA_GPU_DEVICE_VECTOR_CUH_

#include <cstdint>

#include "ffi/device/aligned_vector.h"

namespace xla_gpu {

template <typename T>
using Vector = AlignedVector<T, static_cast<int>(16 / sizeof(T))>;

// Vector `i` of data[size]: element by element where the pointer is not aligned or the last vector is not whole. What
// is past the end is 0.
template <typename T>
__device__ __forceinline__ Vector<T> LoadVector(const T* data, int64_t i, int64_t size, bool aligned) {
  using V = Vector<T>;
  if (aligned) return reinterpret_cast<const V*>(data)[i];
  V vector;
#pragma unroll
  for (int j = 0; j < V::kSize; ++j) {
    const int64_t at = i * V::kSize + j;
    vector.values[j] = at < size ? data[at] : static_cast<T>(0.0f);
  }
  return vector;
}

template <typename T>
__device__ __forceinline__ void StoreVector(T* data, int64_t i, int64_t size, bool aligned, const Vector<T>& vector) {
  using V = Vector<T>;
  if (aligned) {
    reinterpret_cast<V*>(data)[i] = vector;
    return;
  }
#pragma unroll
  for (int j = 0; j < V::kSize; ++j) {
    if (i * V::kSize + j < size) data[i * V::kSize + j] = vector.values[j];
  }
}

// Keeps the compiler from unpacking 16 bytes before this point: elements of 16 bits take a register each.
__device__ __forceinline__ void KeepWhole(uint4* bytes) {
  asm volatile("" : "+r"(bytes->x), "+r"(bytes->y), "+r"(bytes->z), "+r"(bytes->w));
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_VECTOR_CUH_
