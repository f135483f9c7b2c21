// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs, and waits for
// that one's results where it needs them. Without the launch attribute, and before sm_90, both functions do nothing.
#ifndef XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_
#define XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_

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

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_
