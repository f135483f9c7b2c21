#include "ffi/runtime/pjrt_plugin.h"

#include <dlfcn.h>

#include <string>

extern "C" const void* GetPjrtApi();

namespace xla_gpu::pjrt {
namespace {

constexpr char kRemedy[] = "; install JAX's CUDA plug-in, package jax-cuda12-pjrt or jax-cuda13-pjrt, 0.7 or newer";

}  // namespace

Error CheckApi(const Api& api) {
  const Version& version = api.version;
  if (api.struct_size < sizeof(Api) || api.num_entries() <= kExecutableGetCompiledMemoryStats) {
    return Error::FailedPrecondition("the plug-in's PJRT_Api has " + std::to_string(api.struct_size) +
                                     " bytes, too few for a PJRT API of version " + VersionText(kMajor, kOldestMinor) +
                                     kRemedy);
  }
  if (version.major_version != kMajor || version.minor_version < kOldestMinor) {
    return Error::FailedPrecondition("the plug-in offers PJRT API " +
                                     VersionText(version.major_version, version.minor_version) +
                                     ", supported are versions " + std::to_string(kMajor) + ".x from " +
                                     VersionText(kMajor, kOldestMinor) + " on" + kRemedy);
  }
  for (size_t entry : {kErrorDestroy, kErrorMessage, kClientPlatformName, kLoadedExecutableExecute}) {
    if (api.entries()[entry] == nullptr) {
      return Error::FailedPrecondition("the plug-in leaves entry " + std::to_string(entry) + " of its PJRT_Api null" +
                                       kRemedy);
    }
  }
  return {};
}

const Extension* FindExtension(const Api& api, int32_t type) {
  const Extension* extension = api.extension_start;
  for (int i = 0; i < kMaxExtensions && extension != nullptr; ++i) {
    if (extension->type == type) return extension;
    extension = extension->next;
  }
  return nullptr;
}

Error TakeError(const Api& api, void* error) {
  if (error == nullptr) return {};
  ErrorMessageArgs get = {};
  get.struct_size = sizeof get;
  get.error = error;
  api.entries()[kErrorMessage](&get);
  Error taken = Error::FailedPrecondition(get.message != nullptr ? std::string(get.message, get.message_size)
                                                                 : "the plug-in gave no reason");
  ErrorDestroyArgs destroy = {};
  destroy.struct_size = sizeof destroy;
  destroy.error = error;
  api.entries()[kErrorDestroy](&destroy);
  return taken;
}

Error LoadPlugin(const std::string& path, const Api** api) {
  // Local, so that the plug-in's copies of XLA's and LLVM's symbols stay its own. Never closed: plug-ins leave threads
  // behind.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return Error::FailedPrecondition("loading the PJRT plug-in " + path + ": " +
                                     (reason != nullptr ? reason : "unknown reason"));
  }
  using GetApi = const void* (*)();
  const auto get_api = reinterpret_cast<GetApi>(dlsym(library, "GetPjrtApi"));
  if (get_api == nullptr) {
    return Error::FailedPrecondition(path + " is no PJRT plug-in: it has no function GetPjrtApi" + kRemedy);
  }
  if (get_api == &GetPjrtApi) {
    return Error::FailedPrecondition(path + " is this library itself; name the plug-in that it stands in front of");
  }
  const auto* table = static_cast<const Api*>(get_api());
  if (table == nullptr) return Error::FailedPrecondition(path + ": its GetPjrtApi returned null");
  if (Error error = CheckApi(*table); !error.ok()) {
    error.message = path + ": " + error.message;
    return error;
  }
  *api = table;
  return {};
}

}  // namespace xla_gpu::pjrt
