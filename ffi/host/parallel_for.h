// Parallel loops for host kernels: on XLA's thread pool under torch_xla and JAX, on the library's own in eager calls.
#ifndef XLA_GPU_HOST_PARALLEL_FOR_H_
#define XLA_GPU_HOST_PARALLEL_FOR_H_

#include <cstdint>
#include <functional>

namespace xla_gpu {

class Executor {
 public:
  virtual ~Executor() = default;
  // Threads that may run tasks beside the caller's; 0 means that the caller is alone.
  virtual int64_t num_threads() const = 0;
  // Runs `task` some time, on any thread, the caller's included.
  virtual void Schedule(std::function<void()> task) const = 0;
};

// Calls `body(i)` once for each i in [0, count), on the caller's thread and on those of `executor`, and returns when
// all are done. The caller waits for items that another thread has begun, never for a task that has not started: safe
// when the caller itself occupies the pool's last thread. Which thread runs which item is not defined, so `body` must
// write results that do not depend on it. `body` must not throw.
void ParallelFor(const Executor& executor, int64_t count, const std::function<void(int64_t)>& body);

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_PARALLEL_FOR_H_
