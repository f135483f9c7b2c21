// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs, and waits for
// that one's results where it needs them. Without the launch attribute, and before sm_90, both functions do nothing.
#ifndef XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_
#define XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_

#include <cstdint>

namespace xla_gpu {

// Lets the next kernel start once all CTAs have called this or ended.
__device__ inline void AllowDependentLaunch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before has ended and its writes are visible.
__device__ inline void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Reads a word behind WaitForPreviousKernel. Unlike __ldg, which the compiler may move, and from L1 where it is there.
__device__ inline int32_t LoadBehindWait(const int32_t* address) {
  int32_t value;
  asm volatile("ld.global.ca.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Reads a word before WaitForPreviousKernel. The kernel before may write it meanwhile, so that it has to be read again
// behind the wait. From L2, so that L1 keeps no old copy.
__device__ inline int32_t LoadEarly(const int32_t* address) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_
