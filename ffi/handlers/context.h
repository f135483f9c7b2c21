// What differs between a handler's host and CUDA bindings: where the work runs.
#ifndef XLA_GPU_HANDLERS_CONTEXT_H_
#define XLA_GPU_HANDLERS_CONTEXT_H_

#include <functional>
#include <utility>

#include "ffi/device/stream.h"
#include "ffi/host/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace xla_gpu {

// XLA's own thread pool, or in eager calls the library's, behind the same interface.
class XlaExecutor final : public Executor {
 public:
  explicit XlaExecutor(::xla::ffi::ThreadPool pool) : pool_(pool), num_threads_(pool_.num_threads()) {}
  int64_t num_threads() const override { return num_threads_; }
  void Schedule(std::function<void()> task) const override { pool_.Schedule(std::move(task)); }

 private:
  mutable ::xla::ffi::ThreadPool pool_;
  int64_t num_threads_;
};

}  // namespace xla_gpu

// Bindings of the two platforms: the first argument of every handler's implementation.
#define XLA_GPU_BIND_HOST() ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::ThreadPool>()
#define XLA_GPU_BIND_CUDA() ::xla::ffi::Ffi::Bind().Ctx<::xla::ffi::PlatformStream<::xla_gpu::Stream>>()

// Defines the exported C symbol of a handler. Outside of any unnamed namespace, which would make it local.
#define XLA_GPU_DEFINE_HANDLER(symbol, implementation, ...)                                               \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* call_frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, implementation, __VA_ARGS__)

// Defines the handler that computes the bytes of a handler's scratch memory (runtime/xla_gpu.h: xla_gpu_handler). The
// handler table alone refers to it, so it is not exported.
#define XLA_GPU_DEFINE_SCRATCH(symbol, implementation, ...)                                              \
  extern "C" __attribute__((visibility("hidden"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* call_frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, implementation, __VA_ARGS__)

#endif  // XLA_GPU_HANDLERS_CONTEXT_H_
