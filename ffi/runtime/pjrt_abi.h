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
inline constexpr int32_t kStream = 3;
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
inline constexpr size_t kEventDestroy = 5;
inline constexpr size_t kEventIsReady = 6;
inline constexpr size_t kEventError = 7;
inline constexpr size_t kEventAwait = 8;
inline constexpr size_t kEventOnReady = 9;
inline constexpr size_t kClientCreate = 10;
inline constexpr size_t kClientPlatformName = 12;
inline constexpr size_t kClientPlatformVersion = 14;
inline constexpr size_t kClientAddressableDevices = 16;
inline constexpr size_t kClientCompile = 20;
inline constexpr size_t kClientBufferFromHostBuffer = 22;
inline constexpr size_t kDeviceDescriptionKind = 26;
inline constexpr size_t kDeviceGetDescription = 29;
inline constexpr size_t kDeviceDefaultMemory = 33;
inline constexpr size_t kExecutableDestroy = 40;
inline constexpr size_t kExecutableNumOutputs = 44;
inline constexpr size_t kExecutableOptimizedProgram = 48;
inline constexpr size_t kExecutableSerialize = 49;
inline constexpr size_t kLoadedExecutableDestroy = 50;
inline constexpr size_t kLoadedExecutableGetExecutable = 51;
inline constexpr size_t kLoadedExecutableAddressableDevices = 52;
inline constexpr size_t kLoadedExecutableExecute = 55;
inline constexpr size_t kExecutableDeserializeAndLoad = 56;
inline constexpr size_t kBufferDestroy = 58;
inline constexpr size_t kBufferOnDeviceSizeInBytes = 64;
inline constexpr size_t kBufferDevice = 65;
inline constexpr size_t kBufferCopyToDevice = 69;
inline constexpr size_t kBufferToHostBuffer = 70;
inline constexpr size_t kBufferUnsafePointer = 73;
inline constexpr size_t kBufferIncreaseExternalReferenceCount = 74;
inline constexpr size_t kBufferDecreaseExternalReferenceCount = 75;
inline constexpr size_t kBufferOpaqueDeviceMemoryDataPointer = 76;
inline constexpr size_t kExecutableOutputElementTypes = 90;
inline constexpr size_t kExecutableOutputDimensions = 91;
inline constexpr size_t kBufferCopyToMemory = 92;
inline constexpr size_t kClientCreateViewOfDeviceBuffer = 93;
inline constexpr size_t kExecutableGetCompiledMemoryStats = 96;
// Of later versions: those that lack them have shorter tables.
inline constexpr size_t kBufferCopyRawToHost = 100;
inline constexpr size_t kClientCreateErrorBuffer = 118;
inline constexpr size_t kBufferCopyRawToHostFuture = 120;
inline constexpr size_t kBufferDonateWithControlDependency = 125;
inline constexpr size_t kBufferBitcast = 131;
inline constexpr size_t kErrorForEachPayload = 132;

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
  Args* options;                       // PJRT_ExecuteOptions
  void* const* const* argument_lists;  // [num_devices][num_args] buffers
  size_t num_devices;
  size_t num_args;
  void** const* output_lists;     // [num_devices][num_outputs] buffers, out
  void** device_complete_events;  // null: none
  void* execute_device;           // null: those of the executable
};

// ---- Events ----

// Of Destroy, Error and Await, and how the others begin.
struct EventArgs {
  size_t struct_size;
  Extension* extension_start;
  void* event;
};

struct EventIsReadyArgs {
  size_t struct_size;
  Extension* extension_start;
  void* event;
  bool is_ready;  // out
};

struct EventOnReadyArgs {
  size_t struct_size;
  Extension* extension_start;
  void* event;
  void (*callback)(void* error, void* user_arg);  // owns the error, which is null for none
  void* user_arg;
};

// ---- Buffers ----

struct BufferFromHostBufferArgs {
  size_t struct_size;
  Extension* extension_start;
  void* client;
  const void* data;
  int32_t type;  // PJRT_Buffer_Type
  const int64_t* dims;
  size_t num_dims;
  const int64_t* byte_strides;
  size_t num_byte_strides;
  int32_t host_buffer_semantics;
  void* device;
  void* memory;
  void* device_layout;
  void* done_with_host_buffer;  // out, a PJRT_Event
  void* buffer;                 // out
};
static_assert(sizeof(BufferFromHostBufferArgs) == 120);

struct BufferToHostBufferArgs {
  size_t struct_size;
  Extension* extension_start;
  void* buffer;
  void* host_layout;  // null: row-major
  void* data;
  size_t size;
  void* event;       // out
  uint64_t room[8];  // this library alone fills it in
};

struct CreateViewOfDeviceBufferArgs {
  size_t struct_size;
  Extension* extension_start;
  void* client;
  void* device_buffer_ptr;
  const int64_t* dims;
  size_t num_dims;
  int32_t element_type;
  void* layout;
  void* device;
  void (*on_delete_callback)(void* device_buffer_ptr, void* user_arg);
  void* on_delete_callback_arg;
  intptr_t stream;
  void* buffer;  // out
  void* memory;
};
static_assert(sizeof(CreateViewOfDeviceBufferArgs) == 112);

struct CreateErrorBufferArgs {
  size_t struct_size;
  Extension* extension_start;
  void* client;
  int32_t error_code;
  const char* error_message;
  size_t error_message_size;
  const int64_t* dims;
  size_t num_dims;
  int32_t type;
  void* layout;  // null: row-major
  void* memory;
  void* buffer;      // out
  uint64_t room[8];  // this library alone fills it in
};
static_assert(offsetof(CreateErrorBufferArgs, room) == 96);

// Of entries that take a buffer and return one thing: its device, its ready event, an address.
struct BufferArgs {
  size_t struct_size;
  Extension* extension_start;
  void* buffer;
  void* out;
};
inline constexpr size_t kBufferArgsWithoutOut = offsetof(BufferArgs, out);

struct StreamForReadyEventsArgs {
  size_t struct_size;
  void* device;
  intptr_t stream;  // out
};

struct WaitForBufferArgs {
  size_t struct_size;
  intptr_t stream;
  void* buffer;
};

struct StreamExtension {
  Extension base;
  void* (*get_stream_for_external_ready_events)(StreamForReadyEventsArgs* args);
  void* (*wait_until_buffer_ready_on_stream)(WaitForBufferArgs* args);
};

// ---- Registration of custom calls ----

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
