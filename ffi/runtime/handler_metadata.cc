#include "ffi/runtime/handler_metadata.h"

#include <string>

#include "ffi/runtime/ffi_api.h"

namespace xla_gpu {

Error AskHandler(XLA_FFI_Handler* handler, HandlerMetadata* metadata) {
  // Handlers refuse a struct that is smaller than the one they were built with and fill no more than they know of a
  // larger one (API 0.3 appended a type id): room for what later versions append.
  union {
    XLA_FFI_Metadata metadata;
    char room[256];
  } answer = {};
  answer.metadata.struct_size = sizeof answer;
  answer.metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &answer.metadata;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  frame.api = FfiApi();
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;

  Error error = Guarded("the handler", [&] { return TakeError(handler(&frame)); });
  if (!error.ok()) {
    return Error::FailedPrecondition("the handler does not answer which XLA FFI API it was built with (" +
                                     error.message + ")");
  }
  metadata->major = answer.metadata.api_version.major_version;
  metadata->minor = answer.metadata.api_version.minor_version;
  metadata->traits = answer.metadata.traits;
  if (metadata->major == 0 && metadata->minor == 0) {
    return Error::FailedPrecondition(
        "the function does not answer as a typed XLA FFI handler: it is none, or one of the untyped custom-call API");
  }
  return {};
}

Error CheckStages(const xla_gpu_stages& stages, const std::string& runtime, int major, int minor,
                  XLA_FFI_Handler_Traits* traits) {
  if (stages.execute == nullptr) return Error::InvalidArgument("the execute stage is null; a handler needs one");
  const struct {
    const char* name;
    XLA_FFI_Handler* handler;
  } all[] = {{"instantiate", stages.instantiate},
             {"prepare", stages.prepare},
             {"initialize", stages.initialize},
             {"execute", stages.execute}};
  for (const auto& [name, handler] : all) {
    if (handler == nullptr) continue;
    HandlerMetadata metadata;
    if (Error error = AskHandler(handler, &metadata); !error.ok()) {
      error.message = std::string(name) + " stage: " + error.message;
      return error;
    }
    if (metadata.major != major || metadata.minor > minor) {
      return Error::FailedPrecondition(std::string(name) + " stage: the handler was built with XLA FFI API " +
                                       VersionText(metadata.major, metadata.minor) + ", but " + runtime +
                                       " offers API " + VersionText(major, minor) +
                                       "; build the handler with headers of API " + VersionText(major, minor) +
                                       " or older" + (major == 0 && minor == 1 ? " (jaxlib 0.7 ships 0.1)" : ""));
    }
    if (handler == stages.execute) *traits = metadata.traits;
  }
  return {};
}

}  // namespace xla_gpu

extern "C" const char* xla_gpu_handler_version(XLA_FFI_Handler* handler, int* major, int* minor, uint32_t* traits) {
  using xla_gpu::Error;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_handler_version", [&]() -> Error {
    if (handler == nullptr) return Error::InvalidArgument("xla_gpu_handler_version: handler is null");
    xla_gpu::HandlerMetadata metadata;
    if (Error error = xla_gpu::AskHandler(handler, &metadata); !error.ok()) return error;
    if (major != nullptr) *major = metadata.major;
    if (minor != nullptr) *minor = metadata.minor;
    if (traits != nullptr) *traits = metadata.traits;
    return {};
  }));
}
