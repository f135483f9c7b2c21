// The part of PJRT's C API that is about executables, compiled, serialised and loaded, see pjrt_abi.h.
#ifndef XLA_GPU_RUNTIME_PJRT_ABI_EXECUTABLES_H_
#define XLA_GPU_RUNTIME_PJRT_ABI_EXECUTABLES_H_

#include <cstddef>
#include <cstdint>

#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

struct Program {
  size_t struct_size;
  Extension* extension_start;
  const char* code;
  size_t code_size;
  const char* format;
  size_t format_size;
};

struct ClientCompileArgs {
  size_t struct_size;
  Extension* extension_start;
  void* client;
  const Program* program;
  const char* compile_options;
  size_t compile_options_size;
  void* executable;  // out: a loaded executable
};

// The following are filled in by this library alone. Plug-ins refuse a structure that is smaller than their own and
// take a larger one, so each ends in room for later versions.

struct ClientPlatformVersionArgs {
  size_t struct_size;
  Extension* extension_start;
  void* client;
  const char* platform_version;  // out
  size_t platform_version_size;  // out
  uint64_t room[8];
};

struct ClientAddressableDevicesArgs {
  size_t struct_size;
  Extension* extension_start;
  void* client;
  void* const* devices;  // out
  size_t num_devices;    // out
  uint64_t room[8];
};

struct DeviceGetDescriptionArgs {
  size_t struct_size;
  Extension* extension_start;
  void* device;
  void* description;  // out
  uint64_t room[8];
};

struct DeviceDescriptionKindArgs {
  size_t struct_size;
  Extension* extension_start;
  void* description;
  const char* kind;  // out
  size_t kind_size;  // out
  uint64_t room[8];
};

struct LoadedExecutableGetExecutableArgs {
  size_t struct_size;
  Extension* extension_start;
  void* loaded_executable;
  void* executable;  // out: the caller's, to be destroyed
  uint64_t room[8];
};

// Of a loaded executable, too.
struct ExecutableDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  void* executable;
  uint64_t room[8];
};

struct ExecutableNumOutputsArgs {
  size_t struct_size;
  Extension* extension_start;
  void* executable;
  size_t num_outputs;  // out
  uint64_t room[8];
};

struct ExecutableOutputElementTypesArgs {
  size_t struct_size;
  Extension* extension_start;
  void* executable;
  const int32_t* types;  // out: PJRT_Buffer_Type
  size_t num_types;      // out
  uint64_t room[8];
};

struct ExecutableOutputDimensionsArgs {
  size_t struct_size;
  Extension* extension_start;
  void* executable;
  size_t num_outputs;      // out
  const int64_t* dims;     // out: of all results
  const size_t* num_dims;  // out: of each
  uint64_t room[8];
};

struct LoadedExecutableAddressableDevicesArgs {
  size_t struct_size;
  Extension* extension_start;
  void* executable;
  void* const* devices;  // out
  size_t num_devices;    // out
  uint64_t room[8];
};

struct ExecutableOptimizedProgramArgs {
  size_t struct_size;
  Extension* extension_start;
  const void* executable;
  Program* program;  // without code: the plug-in says how much room it takes
};

struct ExecutableSerializeArgs {
  size_t struct_size;
  Extension* extension_start;
  const void* executable;
  const char* bytes;             // out: valid until the deleter is called
  size_t num_bytes;              // out
  void* owner;                   // out
  void (*deleter)(void* owner);  // out
  uint64_t room[8];
};

struct DeserializeAndLoadArgs {
  size_t struct_size;
  Extension* extension_start;
  void* client;
  const char* bytes;
  size_t num_bytes;
  void* loaded_executable;  // out
  uint64_t room[8];         // zero: compile options and load options as they were
};

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_PJRT_ABI_EXECUTABLES_H_
