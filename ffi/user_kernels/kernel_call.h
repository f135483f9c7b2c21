// A launch of a user's kernel, given as a cubin: its parts, their checks, and the launch on a stream.
#ifndef XLA_GPU_USER_KERNELS_KERNEL_CALL_H_
#define XLA_GPU_USER_KERNELS_KERNEL_CALL_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "ffi/base/status.h"
#include "ffi/device/stream.h"

namespace xla_gpu {

// One parameter of the kernel. The driver copies `size` bytes of `value` on this little-endian machine.
struct KernelParameter {
  uint64_t value;
  uint32_t size;
};

struct KernelLaunch {
  std::string_view name;   // of the kernel in the cubin
  std::string_view arch;   // what the cubin was compiled for, "sm_90a", for texts; empty: not known
  std::string_view cubin;  // an ELF file
  const int64_t* grid;     // [3] CTAs, those of all clusters
  const int64_t* block;    // [3] threads of a CTA
  const int64_t* cluster;  // [3] CTAs of a cluster
  int64_t shared_bytes;    // dynamic shared memory of a CTA
  bool cooperative;
  bool pdl;           // programmatic dependent launch
  bool check_inputs;  // wait for the kernel, so that a fault is reported with its name
  std::vector<KernelParameter> parameters;
};

// What can be said against a launch without a GPU. Texts begin with "kernel_call: <name>: ".
Status CheckKernelLaunch(const KernelLaunch& launch);

// Whether the cubin is whole, which costs as much as reading its tables. LaunchKernel checks it where it loads one.
Status CheckCubin(const KernelLaunch& launch);

// Loads the cubin at its first launch in the process, also while the stream is captured, and launches the kernel.
Status LaunchKernel(const KernelLaunch& launch, Stream stream);

}  // namespace xla_gpu

#endif  // XLA_GPU_USER_KERNELS_KERNEL_CALL_H_
