// Executions through the client, repeated without it.
//
// torch_xla's client makes an object of its own for each argument and result of an execution, on each device: under
// SPMD over four devices that takes milliseconds of the host for a decode step. So the adapter records one execution of
// a program, with its executable and its buffers, and repeats it with other buffers in the place of some, in a thread.
#ifndef XLA_GPU_RUNTIME_DIRECT_LAUNCH_H_
#define XLA_GPU_RUNTIME_DIRECT_LAUNCH_H_

#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// Keeps the plug-in's table, before any function below is called.
void DirectLaunchUse(const Api& api);

// Keeps the client, to which arrays go from the host.
void DirectLaunchUseClient(void* client);
void* TheClient();

// Executes; records what it was where the next execution is to be recorded.
void* ExecuteRecorded(LoadedExecutableExecuteArgs* args);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_DIRECT_LAUNCH_H_
