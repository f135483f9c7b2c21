// The library's own threads, for host calls that come without a runtime's pool (eager tensors).
#ifndef XLA_GPU_HOST_THREAD_POOL_H_
#define XLA_GPU_HOST_THREAD_POOL_H_

#include <cstdint>
#include <functional>

#include "ffi/host/parallel_for.h"

namespace xla_gpu {

// One pool for the process. XLA_GPU_NUM_THREADS, read when the pool is made, is the number of threads that work on one
// call, the caller's included; by default as many as it may keep busy (processors.h). Threads start with the
// first task, live as long as the process and are never joined: at exit they sleep, and nothing waits for them. After
// fork() the child's first call makes a fresh pool.
class ThreadPool final : public Executor {
 public:
  static const ThreadPool& Instance();

  int64_t num_threads() const override;
  void Schedule(std::function<void()> task) const override;

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

 private:
  struct State;

  ThreadPool();
  ~ThreadPool() override;

  State* state_;
};

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_THREAD_POOL_H_
