// What an execution that failed returns to the client: buffers that have its error.
//
// torch_xla gives a computation's results places before it runs, and fills them behind it. One that fails leaves them
// empty, and whatever takes such a tensor next, a computation or a read, ends the process. So to the client no
// execution fails: its results are buffers whose error whoever reads them gets, and so does what is computed with them.
#ifndef XLA_GPU_RUNTIME_FAILED_EXECUTIONS_H_
#define XLA_GPU_RUNTIME_FAILED_EXECUTIONS_H_

#include <cstddef>

#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// Puts entries in front of those of the adapter's table that take a buffer, and of the one that destroys it. Comes
// after all others that do, and after BufferViewsUse(). Does nothing with a plug-in that makes no buffers with errors
// (before PJRT API 0.82): there a failed execution is the client's.
void FailedExecutionsUse(const Api& api, Entry* entries, size_t num_entries);

// The error of an argument that an execution which failed was to compute; null: there is none.
void* ErrorOfArguments(const LoadedExecutableExecuteArgs& args);

// Makes an execution's results have its error. Null; the error where that does not go.
void* ReturnFailed(LoadedExecutableExecuteArgs* args, void* error);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_FAILED_EXECUTIONS_H_
