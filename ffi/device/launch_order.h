// How a kernel is launched behind another one; for headers that are compiled without CUDA.
#ifndef XLA_GPU_DEVICE_LAUNCH_ORDER_H_
#define XLA_GPU_DEVICE_LAUNCH_ORDER_H_

namespace xla_gpu {

// Where a kernel stands among those of a call. A dependent one is launched programmatically behind another one of the
// call and may start while that one still runs. Until WaitForPreviousKernel (dependent_launch.cuh) it reads operands of
// the call alone, and writes nothing: no kernel before it is known to have ended. The first one may be launched
// programmatically too; then it waits before it reads what another call may have written.
enum class LaunchOrder { kFirst, kDependent };

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_LAUNCH_ORDER_H_
