// The library's own XLA FFI runtime, as handlers see it: an XLA_FFI_Api table and what stands behind its opaque types.
// Eager calls reach handlers through it; no XLA is involved.
#ifndef XLA_GPU_RUNTIME_FFI_API_H_
#define XLA_GPU_RUNTIME_FFI_API_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ffi/runtime/error.h"
#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  xla_gpu::Error error;
};

// The result of an asynchronous handler. The thread that completes it holds a reference to `state`, so that the
// waiting thread may delete the future as soon as it wakes.
struct XLA_FFI_Future {
  struct State {
    std::mutex mutex;
    std::condition_variable completed;
    bool done = false;
    xla_gpu::Error error;
  };
  std::shared_ptr<State> state = std::make_shared<State>();
};

// One call. Memory and state that the handler leaves behind go with it.
struct XLA_FFI_ExecutionContext {
  XLA_FFI_ExecutionContext(void* stream, int32_t device_ordinal);
  ~XLA_FFI_ExecutionContext();
  XLA_FFI_ExecutionContext(const XLA_FFI_ExecutionContext&) = delete;
  XLA_FFI_ExecutionContext& operator=(const XLA_FFI_ExecutionContext&) = delete;

  bool on_host() const { return device_ordinal < 0; }

  void* const stream;            // cudaStream_t; unused on the host
  const int32_t device_ordinal;  // -1: the host
  const int64_t run_id;

  std::mutex mutex;                // of what follows: handlers may use their context from several threads
  std::vector<void*> allocations;  // made by the handler and not freed yet
  void* state = nullptr;           // what the instantiate stage returned
  int64_t state_type = 0;
  void (*state_deleter)(void* state) = nullptr;
};

namespace xla_gpu {

const XLA_FFI_Api* FfiApi();

// Takes over an error that a handler made through FfiApi(); null is success.
Error TakeError(XLA_FFI_Error* error);

// Waits for a future that a handler made through FfiApi(), and takes it over.
Error TakeFuture(XLA_FFI_Future* future);

}  // namespace xla_gpu

#endif  // XLA_GPU_RUNTIME_FFI_API_H_
