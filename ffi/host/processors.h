// How many processors this process may keep busy.
#ifndef XLA_GPU_HOST_PROCESSORS_H_
#define XLA_GPU_HOST_PROCESSORS_H_

#include <cstdint>

namespace xla_gpu {

// Those of its affinity mask, but no more than its container's quota of processor time (docker's --cpus, a Kubernetes
// limit) lets run all the time, rounded up. At least 1.
int64_t UsableProcessors();

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_PROCESSORS_H_
