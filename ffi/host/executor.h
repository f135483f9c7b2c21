// The name of Executor (parallel_for.h), for headers that CUDA sources include too: <functional> is a fifth of what the
// compiler would read of them.
#ifndef XLA_GPU_HOST_EXECUTOR_H_
#define XLA_GPU_HOST_EXECUTOR_H_

namespace xla_gpu {

class Executor;

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_EXECUTOR_H_
