#include "ffi/runtime/executable_results.h"

#include "ffi/runtime/pjrt_abi_executables.h"
#include "ffi/runtime/pjrt_plugin.h"

namespace xla_gpu::pjrt {
namespace {

template <typename Args>
Error CallOf(const Api& plugin, size_t entry, Args* args) {
  if (plugin.num_entries() <= entry || plugin.entries()[entry] == nullptr) {
    return Error::Unimplemented("the PJRT plug-in lacks entry " + std::to_string(entry));
  }
  args->struct_size = sizeof *args;
  return TakeError(plugin, plugin.entries()[entry](args));
}

Error FormsOf(const Api& plugin, void* executable, std::vector<ResultForm>* forms) {
  ExecutableOutputElementTypesArgs types = {};
  types.executable = executable;
  if (Error error = CallOf(plugin, kExecutableOutputElementTypes, &types); !error.ok()) return error;
  ExecutableOutputDimensionsArgs shapes = {};
  shapes.executable = executable;
  if (Error error = CallOf(plugin, kExecutableOutputDimensions, &shapes); !error.ok()) return error;
  if (types.num_types != shapes.num_outputs) return Error::Internal("an executable has as many types as shapes");
  const int64_t* dims = shapes.dims;
  for (size_t i = 0; i < shapes.num_outputs; ++i) {
    forms->push_back({types.types[i], {dims, dims + shapes.num_dims[i]}});
    dims += shapes.num_dims[i];
  }
  return {};
}

}  // namespace

Error FormsOfResults(const Api& plugin, void* loaded_executable, std::vector<ResultForm>* forms) {
  LoadedExecutableGetExecutableArgs get = {};
  get.loaded_executable = loaded_executable;
  if (Error error = CallOf(plugin, kLoadedExecutableGetExecutable, &get); !error.ok()) return error;
  Error error = FormsOf(plugin, get.executable, forms);
  ExecutableDestroyArgs destroy = {};
  destroy.executable = get.executable;
  CallOf(plugin, kExecutableDestroy, &destroy);
  return error;
}

}  // namespace xla_gpu::pjrt
