// A kernel's parameters lie in constant memory, of which each cache line is fetched where it is first used.
#ifndef XLA_GPU_DEVICE_FETCH_PARAMETERS_CUH_
#define XLA_GPU_DEVICE_FETCH_PARAMETERS_CUH_

#include <cstdint>

namespace xla_gpu {

// Reads a word of each cache line of the kernel's parameters, so that all lines are fetched at once instead of one
// after the other.
template <typename Params>
__device__ inline void FetchParameters(const Params& params) {
  constexpr int kLine = 64 / sizeof(uint32_t);
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(&params);
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Params) / sizeof(uint32_t)); i += kLine) any |= words[i];
  asm volatile("" ::"r"(any));
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_FETCH_PARAMETERS_CUH_
