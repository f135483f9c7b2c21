// A handler's metadata: the FFI API that it was built with, and its traits.
#ifndef XLA_GPU_RUNTIME_HANDLER_METADATA_H_
#define XLA_GPU_RUNTIME_HANDLER_METADATA_H_

#include <cstdint>

#include "ffi/runtime/error.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu {

struct HandlerMetadata {
  int major = 0;  // of the FFI API whose headers the handler was built with
  int minor = 0;
  XLA_FFI_Handler_Traits traits = 0;
};

// Asks `handler`, which must not be null, through the metadata extension that every handler of the typed FFI answers.
Error AskHandler(XLA_FFI_Handler* handler, HandlerMetadata* metadata);

// An error unless all stages of `stages` were built with an FFI API that a runtime of API `major`.`minor` can call.
// `traits` receives those of the execute stage. `runtime` names the runtime in texts.
Error CheckStages(const xla_gpu_stages& stages, const std::string& runtime, int major, int minor,
                  XLA_FFI_Handler_Traits* traits);

}  // namespace xla_gpu

#endif  // XLA_GPU_RUNTIME_HANDLER_METADATA_H_
