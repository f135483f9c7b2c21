// Programs that torch_xla runs in the place of others.
//
// For each argument of an execution torch_xla takes the host 0.2 us and more: for a decode step with its weights 0.05
// to 0.2 ms. So it executes a small program that takes what changes alone and returns results of the same dtypes and
// shapes, the proxy, and the adapter executes the program itself, with the buffers of the other arguments as they were
// recorded once. Arguments that change, donated ones among them, and all results are the client's buffers as ever.
#ifndef XLA_GPU_RUNTIME_PROXY_PROGRAMS_H_
#define XLA_GPU_RUNTIME_PROXY_PROGRAMS_H_

#include <cstddef>

#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// Puts entries in front of those of the adapter's table that give a buffer's unsafe pointer and destroy executables.
void ProxiesUse(const Api& api, Entry* entries);

// An execution that the client wants: of a proxy the program behind it.
void* ExecuteForClient(LoadedExecutableExecuteArgs* args);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_PROXY_PROGRAMS_H_
