// Registration of handlers with XLA runtimes: through the FFI API of a runtime inside this process, and through the
// custom-call extension of a PJRT plug-in.
#include <cstring>
#include <string>

#include "ffi/runtime/error.h"
#include "ffi/runtime/handler_metadata.h"
#include "ffi/runtime/pjrt_abi.h"
#include "ffi/runtime/pjrt_plugin.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu {
namespace {

Error CheckNames(const char* target, const char* platform, const xla_gpu_stages* stages) {
  if (target == nullptr || target[0] == '\0') return Error::InvalidArgument("the target's name is null or empty");
  if (platform == nullptr || platform[0] == '\0') return Error::InvalidArgument("the platform is null or empty");
  if (stages == nullptr) return Error::InvalidArgument("stages is null");
  return {};
}

// The text of an error of the runtime; destroys the error.
Error TakeRuntimeError(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == nullptr) return {};
  XLA_FFI_Error_GetMessage_Args get = {};
  get.struct_size = XLA_FFI_Error_GetMessage_Args_STRUCT_SIZE;
  get.error = error;
  api->XLA_FFI_Error_GetMessage(&get);
  Error taken = Error::FailedPrecondition(get.message != nullptr ? get.message : "the runtime gave no reason");
  XLA_FFI_Error_Destroy_Args destroy = {};
  destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  destroy.error = error;
  api->XLA_FFI_Error_Destroy(&destroy);
  return taken;
}

Error RegisterFfi(const XLA_FFI_Api* api, const char* target, const char* platform, const xla_gpu_stages* stages) {
  if (api == nullptr) return Error::InvalidArgument("api is null");
  if (Error error = CheckNames(target, platform, stages); !error.ok()) return error;
  if (api->struct_size < XLA_FFI_STRUCT_SIZE(XLA_FFI_Api, XLA_FFI_Handler_Register) ||
      api->XLA_FFI_Handler_Register == nullptr) {
    return Error::FailedPrecondition("the runtime's FFI API (" + std::to_string(api->struct_size) +
                                     " bytes) has no function that registers handlers");
  }
  XLA_FFI_Handler_Traits traits = 0;
  if (Error error =
          CheckStages(*stages, "the runtime", api->api_version.major_version, api->api_version.minor_version, &traits);
      !error.ok()) {
    return error;
  }
  XLA_FFI_Handler_Register_Args args = {};
  args.struct_size = XLA_FFI_Handler_Register_Args_STRUCT_SIZE;
  args.name = {target, std::strlen(target)};
  args.platform = {platform, std::strlen(platform)};
  args.bundle = {stages->instantiate, stages->prepare, stages->initialize, stages->execute};
  args.traits = traits;
  return TakeRuntimeError(api, api->XLA_FFI_Handler_Register(&args));
}

const pjrt::GpuCustomCallExtension* FindCustomCallExtension(const pjrt::Api& api) {
  const auto* extension =
      reinterpret_cast<const pjrt::GpuCustomCallExtension*>(pjrt::FindExtension(api, pjrt::kGpuCustomCall));
  if (extension == nullptr || extension->base.struct_size < sizeof *extension) return nullptr;
  return extension->register_custom_call == nullptr ? nullptr : extension;
}

Error RegisterThroughExtension(const pjrt::Api& api, const char* target, const xla_gpu_stages& stages,
                               XLA_FFI_Handler_Traits traits) {
  const pjrt::GpuCustomCallExtension* extension = FindCustomCallExtension(api);
  if (extension == nullptr) {
    return Error::FailedPrecondition(
        "the PJRT plug-in (PJRT API " + VersionText(api.version.major_version, api.version.minor_version) +
        ") has no PJRT_Gpu_Custom_Call extension, so it takes no handlers; what is needed is JAX's CUDA plug-in, "
        "package jax-cuda12-pjrt or jax-cuda13-pjrt");
  }
  pjrt::GpuRegisterCustomCallArgs args = {};
  args.struct_size = sizeof args;
  args.function_name = target;
  args.function_name_size = std::strlen(target);
  args.api_version = 1;
  args.instantiate = reinterpret_cast<void*>(stages.instantiate);
  args.prepare = reinterpret_cast<void*>(stages.prepare);
  args.initialize = reinterpret_cast<void*>(stages.initialize);
  args.execute = reinterpret_cast<void*>(stages.execute);
  args.traits = traits;
  return pjrt::TakeError(api, extension->register_custom_call(&args));
}

// ---- The FFI API behind a plug-in ----

// The extension reports no failure (the plug-ins of jax 0.7.2 and 0.10.2 drop the runtime's error) and no FFI version.
// But a runtime asks every handler that it registers for its metadata, and newer runtimes pass their FFI API along. So
// a handler that only stores the API is registered first, and the API is used directly from then on.
thread_local const XLA_FFI_Api* probed_api = nullptr;

XLA_FFI_Error* ProbeHandler(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    probed_api = frame->api;
    XLA_FFI_Metadata* metadata = reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    return nullptr;
  }
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = "xla_gpu_api_probe is not to be called";
  args.errc = XLA_FFI_Error_Code_UNIMPLEMENTED;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// `ffi_api` becomes null where the plug-in does not tell.
Error ProbeFfiApi(const pjrt::Api* api, const XLA_FFI_Api** ffi_api) {
  *ffi_api = nullptr;
  if (api == nullptr) return Error::InvalidArgument("pjrt_api is null");
  if (Error error = pjrt::CheckApi(*api); !error.ok()) return error;
  probed_api = nullptr;
  const xla_gpu_stages probe = {nullptr, nullptr, nullptr, ProbeHandler};
  if (Error error = RegisterThroughExtension(*api, "xla_gpu_api_probe", probe, 0); !error.ok()) return error;
  *ffi_api = probed_api;
  return {};
}

Error RegisterPjrt(const pjrt::Api* api, const char* target, const xla_gpu_stages* stages) {
  if (Error error = CheckNames(target, "CUDA", stages); !error.ok()) return error;
  const XLA_FFI_Api* ffi_api = nullptr;
  if (Error error = ProbeFfiApi(api, &ffi_api); !error.ok()) return error;
  if (ffi_api != nullptr) return RegisterFfi(ffi_api, target, "CUDA", stages);
  // A refusal would go unnoticed until a program is compiled. Handlers of the oldest API are taken by all plug-ins.
  XLA_FFI_Handler_Traits traits = 0;
  const std::string version = VersionText(api->version.major_version, api->version.minor_version);
  const std::string runtime =
      "the PJRT plug-in (PJRT API " + version + "; its FFI API, unknown, is taken as the oldest)";
  if (Error error = CheckStages(*stages, runtime, 0, 1, &traits); !error.ok()) return error;
  return RegisterThroughExtension(*api, target, *stages, traits);
}

// "registering xla_gpu_simple_add on Host: …"
Error WithTarget(Error error, const char* target, const char* platform) {
  if (error.ok()) return error;
  error.message = "registering " + std::string(target != nullptr ? target : "(null)") + " on " +
                  (platform != nullptr ? platform : "(null)") + ": " + error.message;
  return error;
}

}  // namespace
}  // namespace xla_gpu

extern "C" const char* xla_gpu_register_ffi(const XLA_FFI_Api* api, const char* target, const char* platform,
                                            const xla_gpu_stages* stages) {
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_register_ffi", [&] {
    return xla_gpu::WithTarget(xla_gpu::RegisterFfi(api, target, platform, stages), target, platform);
  }));
}

extern "C" const char* xla_gpu_register_pjrt(const void* pjrt_api, const char* target, const xla_gpu_stages* stages) {
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_register_pjrt", [&] {
    const auto* api = static_cast<const xla_gpu::pjrt::Api*>(pjrt_api);
    return xla_gpu::WithTarget(xla_gpu::RegisterPjrt(api, target, stages), target, "CUDA");
  }));
}

extern "C" const char* xla_gpu_pjrt_ffi_api(const void* pjrt_api, const XLA_FFI_Api** ffi_api) {
  using xla_gpu::Error;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_pjrt_ffi_api", [&]() -> Error {
    if (ffi_api == nullptr) return Error::InvalidArgument("xla_gpu_pjrt_ffi_api: ffi_api is null");
    return xla_gpu::ProbeFfiApi(static_cast<const xla_gpu::pjrt::Api*>(pjrt_api), ffi_api);
  }));
}
