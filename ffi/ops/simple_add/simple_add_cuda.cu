// simple_add on a GPU: 16 bytes per access where the three pointers allow it.
#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/aligned_vector.h"
#include "ffi/device/dispatch.cuh"
#include "ffi/ops/simple_add/simple_add.h"

namespace xla_gpu {
namespace {

constexpr int kAddThreads = 256;
// Enough CTAs to fill any GPU. A grid-stride loop takes the rest of a large problem.
constexpr int64_t kMaxAddBlocks = 1 << 16;

// NOTE: a float32 sum of two 16-bit values, rounded once more, equals the 16-bit sum: float32 has 2p + 2 digits.
template <typename T>
__device__ T Add(T a, T b) {
  return static_cast<T>(static_cast<float>(a) + static_cast<float>(b));
}

template <typename T, int kVec>
__global__ void __launch_bounds__(kAddThreads) SimpleAddKernel(const T* __restrict__ a,  // [size]
                                                               const T* __restrict__ b,  // [size]
                                                               T* __restrict__ out,      // [size]
                                                               int64_t size) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kAddThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kAddThreads + threadIdx.x;
  const int64_t vectors = size / kVec;
  for (int64_t i = first; i < vectors; i += step) {
    const AlignedVector<T, kVec> x = reinterpret_cast<const AlignedVector<T, kVec>*>(a)[i];
    const AlignedVector<T, kVec> y = reinterpret_cast<const AlignedVector<T, kVec>*>(b)[i];
    AlignedVector<T, kVec> sum;
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum.values[j] = Add(x.values[j], y.values[j]);
    reinterpret_cast<AlignedVector<T, kVec>*>(out)[i] = sum;
  }
  for (int64_t i = vectors * kVec + first; i < size; i += step) out[i] = Add(a[i], b[i]);
}

template <typename T>
Status Launch(const SimpleAddParams& params, Stream stream) {
  constexpr int kVec = 16 / sizeof(T);
  const T* a = static_cast<const T*>(params.a);
  const T* b = static_cast<const T*>(params.b);
  T* out = static_cast<T*>(params.out);
  const uintptr_t address_bits =
      reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(out);
  const bool aligned = address_bits % 16 == 0;
  const int64_t vectors = aligned ? (params.size + kVec - 1) / kVec : params.size;
  const auto blocks = static_cast<unsigned>(std::min((vectors + kAddThreads - 1) / kAddThreads, kMaxAddBlocks));
  if (aligned) {
    SimpleAddKernel<T, kVec><<<blocks, kAddThreads, /*shared_mem=*/0, stream>>>(a, b, out, params.size);
  } else {
    SimpleAddKernel<T, 1><<<blocks, kAddThreads, /*shared_mem=*/0, stream>>>(a, b, out, params.size);
  }
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace

Status LaunchSimpleAdd(const SimpleAddParams& params, Stream stream) {
  if (params.size == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "simple_add: a",
                       [&](auto zero) { return Launch<decltype(zero)>(params, stream); });
}

}  // namespace xla_gpu
