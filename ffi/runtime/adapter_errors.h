// Errors of the adapter among those of the plug-in, which has no entry that makes one.
#ifndef XLA_GPU_RUNTIME_ADAPTER_ERRORS_H_
#define XLA_GPU_RUNTIME_ADAPTER_ERRORS_H_

#include <cstddef>

#include "ffi/runtime/error.h"
#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// Puts entries in front of those of the adapter's table that take an error.
void AdapterErrorsUse(Entry* entries, size_t num_entries);

// A PJRT_Error of the adapter, which the client destroys. It must not be ok.
void* RefusedBy(const Error& error);

// The code and text of an error, the plug-in's or the adapter's own, which is destroyed.
Error TakeAnyError(void* error);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_ADAPTER_ERRORS_H_
