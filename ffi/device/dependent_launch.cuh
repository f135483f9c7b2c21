// Programmatic dependent launch: a kernel may begin while the one before it in the stream still runs, and waits for its
// results where it needs them. Only kernels launched with that attribute do; for others, and before sm_90, both
// functions do nothing.
#ifndef XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_
#define XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_

namespace xla_gpu {

// The next kernel may be started as far as this block is concerned.
__device__ inline void AllowDependentLaunch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernel before has ended, and what it wrote can be seen.
__device__ inline void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_DEPENDENT_LAUNCH_CUH_
