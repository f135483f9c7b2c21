// A PJRT plug-in: loaded, its table checked, its extensions found.
#ifndef XLA_GPU_RUNTIME_PJRT_PLUGIN_H_
#define XLA_GPU_RUNTIME_PJRT_PLUGIN_H_

#include <cstdint>
#include <string>

#include "ffi/runtime/error.h"
#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// An error unless the table's layout is one that this library knows.
Error CheckApi(const Api& api);

// The extension of that type, or null.
const Extension* FindExtension(const Api& api, int32_t type);

// Takes over an error of the plug-in; null is success.
Error TakeError(const Api& api, void* error);

// Loads the plug-in at `path` for the rest of the process and checks its table. Loading it twice gives the same one.
Error LoadPlugin(const std::string& path, const Api** api);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_PJRT_PLUGIN_H_
