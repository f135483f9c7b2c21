// Where a handler's work runs.
#ifndef XLA_GPU_HANDLERS_CONTEXT_H_
#define XLA_GPU_HANDLERS_CONTEXT_H_

#include <functional>
#include <initializer_list>
#include <optional>
#include <utility>

#include "ffi/device/stream.h"
#include "ffi/host/parallel_for.h"
#include "xla/ffi/api/ffi.h"

namespace xla_gpu {

// The first argument of every handler's implementation. It is of one type for host and CUDA handlers, so that XLA's
// templates, most of a handler's code, are instantiated once for both.
class CallContext {
 public:
  CallContext(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context, ::xla::ffi::DiagnosticEngine& diagnostic)
      : api_(api), context_(context), diagnostic_(&diagnostic) {}

  // In CUDA handlers. Throws std::runtime_error where the call is not on a GPU; NoThrow (check.h) makes it an error.
  Stream stream() const;
  // In host handlers.
  ::xla::ffi::ThreadPool thread_pool() const;

 private:
  const XLA_FFI_Api* api_;
  XLA_FFI_ExecutionContext* context_;
  ::xla::ffi::DiagnosticEngine* diagnostic_;
};

// Traits of CUDA handlers: XLA may capture them into CUDA graphs. Not so where XLA_GPU_CHECK_INPUTS is 1 when a handler
// is first asked, which is when it is registered: checks read device memory, which no capture allows.
std::initializer_list<::xla::ffi::Traits> CaptureTraits();

// XLA's own thread pool, or in eager calls the library's, behind the same interface.
class XlaExecutor final : public Executor {
 public:
  explicit XlaExecutor(const CallContext& context) : pool_(context.thread_pool()), num_threads_(pool_.num_threads()) {}
  int64_t num_threads() const override { return num_threads_; }
  void Schedule(std::function<void()> task) const override { pool_.Schedule(std::move(task)); }

 private:
  mutable ::xla::ffi::ThreadPool pool_;
  int64_t num_threads_;
};

}  // namespace xla_gpu

template <>
struct xla::ffi::CtxDecoding<xla_gpu::CallContext> {
  using Type = xla_gpu::CallContext;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    return Type(api, context, diagnostic);
  }
};

// A binding, to which a handler adds its operands, results and attributes.
#define XLA_GPU_BIND() ::xla::ffi::Ffi::Bind().Ctx<::xla_gpu::CallContext>()

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
