// Programs that torch_xla runs in the place of others.
//
// For each argument and each result of an execution torch_xla takes the host about a microsecond, and 10 us where the
// result becomes a tensor: 0.3 ms for a decode step with its weights and caches. So it executes a small program that
// takes what changes and returns what is new, the proxy, and the adapter executes the program itself with the buffers
// of the others, which were recorded. What the program updates in place stays the client's buffer as torch_xla knows
// it, and has another one of the plug-in behind it, see current_buffers.h: entries that take a buffer get that one.
// Order, errors and waits are those of the proxy's execution, which is one of torch_xla like all others.
#ifndef XLA_GPU_RUNTIME_PROXY_PROGRAMS_H_
#define XLA_GPU_RUNTIME_PROXY_PROGRAMS_H_

#include <cstddef>

#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// Puts entries in front of those of the adapter's table that take a buffer, and of the one that destroys executables.
void ProxiesUse(Entry* entries, size_t num_entries);

// An execution that the client wants: of a proxy the program behind it.
void* ExecuteForClient(LoadedExecutableExecuteArgs* args);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_PROXY_PROGRAMS_H_
