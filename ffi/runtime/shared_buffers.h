// Device memory of another framework as PJRT buffers, and PJRT buffers as that framework's tensors, without copies.
//
// torch_xla 2.9 can move host memory alone. So an address in device memory travels to the client in the place of host
// memory, and comes back as a buffer's "unsafe pointer"; the entries below, which the adapter puts into its table, know
// such addresses and do what is meant. While nothing is announced they pass every call on.
#ifndef XLA_GPU_RUNTIME_SHARED_BUFFERS_H_
#define XLA_GPU_RUNTIME_SHARED_BUFFERS_H_

#include <cstdint>

#include "ffi/runtime/buffer_views.h"
#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// ---- Entries of the adapter's table, after BufferViewsUse() ----

void* SharedBufferFromHostBuffer(void* args);
void* SharedBufferUnsafePointer(void* args);
void* SharedBufferDestroy(void* args);

// Of events: one that has happened stands for the end of a transfer that was none.
void* SharedEventDestroy(void* args);
void* SharedEventIsReady(void* args);
void* SharedEventError(void* args);
void* SharedEventAwait(void* args);
void* SharedEventOnReady(void* args);
void* EventThatHasHappened();

// ---- Exported buffers (exported_buffers.cc) ----

// Gives back what the other framework is done with.
void GiveBackReturned();

// Whether the other framework has the buffer, which its client wants to destroy: it is destroyed later then.
bool KeepExported(void* buffer);

// ---- Placeholders (placeholder_buffers.cc) ----
//
// A placeholder is a buffer that stands for another framework's memory in the arguments of programs. Each execution
// gets a view of the memory that was bound last. It costs the client nothing: torch_xla takes 20 us to make a buffer.

void AddPlaceholder(int64_t id, void* buffer, ViewShape shape, void* device);
void RemovePlaceholder(void* buffer);

// Puts views into the arguments of an execution, as long as the scope lives.
class BoundArguments {
 public:
  explicit BoundArguments(LoadedExecutableExecuteArgs* args);
  ~BoundArguments();
  BoundArguments(const BoundArguments&) = delete;
  BoundArguments& operator=(const BoundArguments&) = delete;

  const Error& error() const { return error_; }

 private:
  Error Bind();

  LoadedExecutableExecuteArgs* const args_;
  void* const* const* const given_;
  std::vector<std::vector<void*>> lists_;
  std::vector<void* const*> pointers_;
  std::vector<void*> replaced_;  // views of earlier executions, which may still run
  Error error_;
};

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_SHARED_BUFFERS_H_
