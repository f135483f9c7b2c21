// The few structures of the PJRT C API that this library reads or writes. They are declared here, and not taken
// from XLA's headers, because the library meets plug-ins of many versions at run time and must rely on no more than
// what all of them share: the API's rule is that structures and its function table only grow at their ends, each
// beginning with its own size. The last exception was version 0.57, which moved entries of the table; older ones are
// refused.
#ifndef XLA_GPU_RUNTIME_PJRT_ABI_H_
#define XLA_GPU_RUNTIME_PJRT_ABI_H_

#include <cstddef>
#include <cstdint>

namespace xla_gpu::pjrt {

inline constexpr int kMajor = 0;
inline constexpr int kOldestMinor = 57;

struct Extension {
  size_t struct_size;
  int32_t type;
  Extension* next;
};

// Extension types are appended to an enumeration, so these stay.
inline constexpr int32_t kGpuCustomCall = 0;
// Longer than any known chain: a plug-in has at most one extension of each of some 25 types. A longer chain is taken
// for a cycle.
inline constexpr int kMaxExtensions = 1000;

struct Version {
  size_t struct_size;
  Extension* extension_start;
  int major_version;
  int minor_version;
};

// Every entry of the table takes a pointer to its structure of arguments and returns an error or null, except for the
// two that return nothing.
using Entry = void* (*)(void* args);

// What PJRT_Api begins with; the entries follow.
struct Api {
  size_t struct_size;
  Extension* extension_start;
  Version version;

  const Entry* entries() const { return reinterpret_cast<const Entry*>(this + 1); }
  size_t num_entries() const { return struct_size < sizeof(Api) ? 0 : (struct_size - sizeof(Api)) / sizeof(Entry); }
};
static_assert(sizeof(Api) == 40, "PJRT's function table begins 40 bytes into PJRT_Api");

// Positions in the table, as in the headers of versions 0.57 to 0.115.
inline constexpr size_t kErrorDestroy = 0;
inline constexpr size_t kErrorMessage = 1;
inline constexpr size_t kErrorGetCode = 2;
inline constexpr size_t kClientPlatformName = 12;
inline constexpr size_t kLoadedExecutableExecute = 55;
inline constexpr size_t kExecutableDeserializeAndLoad = 56;
inline constexpr size_t kExecutableGetCompiledMemoryStats = 96;

// How every structure of arguments begins.
struct Args {
  size_t struct_size;
  Extension* extension_start;
};

struct ErrorDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  void* error;
};

struct ErrorMessageArgs {
  size_t struct_size;
  Extension* extension_start;
  const void* error;
  const char* message;  // out
  size_t message_size;  // out
};

struct ErrorGetCodeArgs {
  size_t struct_size;
  Extension* extension_start;
  const void* error;
  int32_t code;  // out
};

inline constexpr int32_t kFailedPrecondition = 9;  // PJRT_Error_Code

struct ClientPlatformNameArgs {
  size_t struct_size;
  Extension* extension_start;
  void* client;
  const char* platform_name;  // out
  size_t platform_name_size;  // out
};

struct LoadedExecutableExecuteArgs {
  size_t struct_size;
  Extension* extension_start;
  void* executable;
  Args* options;  // PJRT_ExecuteOptions
  // More follows, which the adapter leaves as it is.
};

struct GpuRegisterCustomCallArgs {
  size_t struct_size;
  const char* function_name;
  size_t function_name_size;
  int api_version;  // 1: typed
  void* instantiate;
  void* prepare;
  void* initialize;
  void* execute;
  uint32_t traits;   // since version 3 of the extension; older plug-ins ask the handler
  uint32_t unused;   // together with what follows room for later versions: plug-ins refuse a smaller structure than
  uint64_t room[8];  // their own, and take a larger one
};

struct GpuCustomCallExtension {
  Extension base;
  void* (*register_custom_call)(GpuRegisterCustomCallArgs* args);
};

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_PJRT_ABI_H_
