// Device memory of another framework as PJRT buffers, and PJRT buffers as that framework's tensors, without copies.
//
// torch_xla 2.9 can move host memory alone. So an address in device memory travels to the client in the place of host
// memory, and comes back as a buffer's "unsafe pointer"; the entries below, which the adapter puts into its table, know
// such addresses and do what is meant. While nothing is announced they pass every call on.
#ifndef XLA_GPU_RUNTIME_SHARED_BUFFERS_H_
#define XLA_GPU_RUNTIME_SHARED_BUFFERS_H_

#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// Keeps the plug-in's table for the entries below; false where it lacks what they need.
bool SharedBuffersUse(const Api& api);

void* SharedBufferFromHostBuffer(void* args);
void* SharedBufferUnsafePointer(void* args);
void* SharedBufferDestroy(void* args);

// Of events: one that has happened stands for the end of a transfer that was none.
void* SharedEventDestroy(void* args);
void* SharedEventIsReady(void* args);
void* SharedEventError(void* args);
void* SharedEventAwait(void* args);
void* SharedEventOnReady(void* args);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_SHARED_BUFFERS_H_
