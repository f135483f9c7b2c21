// The C interface of the library: what Python reaches through ctypes. Names are stable within a minor version.
//
// Functions that can fail return NULL for success, or an error text. The text belongs to the calling thread and is
// valid until that thread's next call into this interface. No function throws or aborts.
#ifndef XLA_GPU_RUNTIME_XLA_GPU_H_
#define XLA_GPU_RUNTIME_XLA_GPU_H_

#include <stddef.h>
#include <stdint.h>

#include "xla/ffi/api/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

#define XLA_GPU_EXPORT __attribute__((visibility("default")))

// ---- What the library holds ----

typedef struct xla_gpu_handler {
  const char* target;    // "xla_gpu_simple_add"
  const char* platform;  // "Host" or "CUDA"
  XLA_FFI_Handler* execute;
  // A second handler, which computes how much scratch memory `execute` takes as its last result, a uint8 array: it
  // takes the operands and attributes of `execute`, reads no operand's data, runs on the host and writes the bytes to
  // its one result, int64[]. The answer depends on shapes, dtypes and attributes alone, and is the same on every
  // platform and in every build. NULL: `execute` takes no scratch memory.
  XLA_FFI_Handler* scratch_bytes;
} xla_gpu_handler;

// The handler table; `count` receives its length. Constant for the life of the process.
XLA_GPU_EXPORT const xla_gpu_handler* xla_gpu_handlers(size_t* count);

// A JSON object: {"version": "0.1.0", "ffi_api": [0, 1], "cuda": "13.0" or null, "cuda_architectures": ["80", …],
// "compiler": "…", "host_isa": "avx512" (what this processor will run), "host_processors": 16 (that this process may
// keep busy)}.
XLA_GPU_EXPORT const char* xla_gpu_build_info(void);

// ---- Registration with an XLA runtime ----

// Stages of a handler, as jax.ffi names them. All but `execute` may be NULL.
typedef struct xla_gpu_stages {
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* prepare;
  XLA_FFI_Handler* initialize;
  XLA_FFI_Handler* execute;
} xla_gpu_stages;

// Registers with the runtime whose FFI API is `api` (torch_xla's own CPU client: platform "Host").
XLA_GPU_EXPORT const char* xla_gpu_register_ffi(const XLA_FFI_Api* api, const char* target, const char* platform,
                                                const xla_gpu_stages* stages);

// Registers with the CUDA runtime inside a PJRT plug-in, through its PJRT_Gpu_Custom_Call extension. `pjrt_api` is the
// PJRT_Api* of the plug-in.
XLA_GPU_EXPORT const char* xla_gpu_register_pjrt(const void* pjrt_api, const char* target,
                                                 const xla_gpu_stages* stages);

// The FFI API of the CUDA runtime inside a PJRT plug-in; `ffi_api` receives NULL where the plug-in does not tell (jax
// 0.7.2's does not, 0.10.2's does).
XLA_GPU_EXPORT const char* xla_gpu_pjrt_ffi_api(const void* pjrt_api, const XLA_FFI_Api** ffi_api);

// The FFI API version that a handler was built with, asked from the handler itself; `traits` may be NULL.
XLA_GPU_EXPORT const char* xla_gpu_handler_version(XLA_FFI_Handler* handler, int* major, int* minor, uint32_t* traits);

// ---- Calls without an XLA runtime (eager tensors) ----

typedef struct xla_gpu_buffer {
  void* data;
  const int64_t* dims;  // [rank], row-major
  int32_t rank;
  int32_t dtype;  // XLA_FFI_DataType
} xla_gpu_buffer;

typedef struct xla_gpu_attribute {
  const char* name;  // attributes may come in any order
  int32_t type;      // XLA_FFI_AttrType: SCALAR, ARRAY, STRING or DICTIONARY
  int32_t dtype;     // XLA_FFI_DataType of a scalar's value or of an array's elements; else unused
  const void* data;  // the value, the elements, the bytes, or a dictionary's members: const xla_gpu_attribute[size]
  size_t size;       // 1 for a scalar; elements of an array, bytes of a string, members of a dictionary
} xla_gpu_attribute;

typedef struct xla_gpu_call_args {
  size_t struct_size;  // sizeof(xla_gpu_call_args)
  xla_gpu_stages stages;
  const xla_gpu_buffer* operands;
  size_t num_operands;
  const xla_gpu_buffer* results;
  size_t num_results;
  const xla_gpu_attribute* attributes;
  size_t num_attributes;
  void* stream;            // cudaStream_t; unused on the host
  int32_t device_ordinal;  // -1 on the host
} xla_gpu_call_args;

// Runs all stages of a handler over raw pointers, on the host with the library's own threads, on CUDA on `stream` of
// device `device_ordinal`. Writes the handler's error code (XLA_FFI_Error_Code) to `code` where the call failed.
XLA_GPU_EXPORT const char* xla_gpu_call(const xla_gpu_call_args* args, int32_t* code);

// ---- tvm-ffi functions as handlers ----

// Functions of the process's libtvm_ffi.so, which this library is not linked with.
typedef struct xla_gpu_tvm_ffi_api {
  size_t struct_size;                                                                            // sizeof(this)
  int (*function_call)(void* function, void* arguments, int32_t num_arguments, void* result);    // TVMFFIFunctionCall
  int (*env_set_stream)(int32_t device_type, int32_t device_id, void* stream, void** previous);  // TVMFFIEnvSetStream
  void (*error_move_from_raised)(void** error);  // TVMFFIErrorMoveFromRaised
  int (*object_dec_ref)(void* object);           // TVMFFIObjectDecRef
} xla_gpu_tvm_ffi_api;

typedef struct xla_gpu_tvm_ffi_target {
  size_t struct_size;            // sizeof(this)
  const char* name;              // for error texts
  void* function;                // a TVMFFIObjectHandle, which the caller keeps alive
  const char* const* arguments;  // "args", "rets", "args.<i>", "rets.<i>", "attrs.<name>" or "ctx.stream" each
  size_t num_arguments;
  int32_t on_cuda;
  int32_t allow_capture;  // the handler may be captured into command buffers
} xla_gpu_tvm_ffi_target;

// Makes a handler that calls the function; a process has 128 of them, which are never given back.
XLA_GPU_EXPORT const char* xla_gpu_tvm_ffi_register(const xla_gpu_tvm_ffi_api* api,
                                                    const xla_gpu_tvm_ffi_target* target, XLA_FFI_Handler** handler);

// ---- PJRT adapter ----

// Sets the PJRT plug-in that this library's GetPjrtApi() adapts. Call it before the first GetPjrtApi().
XLA_GPU_EXPORT const char* xla_gpu_pjrt_use_plugin(const char* path);

// What became of the executables compiled through the adapter while XLA_GPU_EXECUTABLE_CACHE named a folder: loaded
// from a file, compiled, of those stored, and files that could not be used.
XLA_GPU_EXPORT void xla_gpu_executable_cache_counts(int64_t counts[4]);

// While programs are recorded, each compilation through the adapter whose executable is not in the cache fails and
// leaves its program to threads that xla_gpu_compile_recorded starts, before or afterwards; `programs` is how many
// there are by then. Once recording is off, the next compilation of each waits for its executable and gets it.
// xla_gpu_finish_recorded ends the threads, which must not outlive main(), when they have compiled everything, or with
// `drop` what they have begun; `waiting` is how many executables were not fetched yet. Without an adapter nothing
// happens.
XLA_GPU_EXPORT void xla_gpu_record_programs(int32_t on);
XLA_GPU_EXPORT const char* xla_gpu_compile_recorded(int32_t threads, int64_t* programs);
XLA_GPU_EXPORT const char* xla_gpu_finish_recorded(int32_t drop, int64_t* waiting);

// Begins to load these files of the cache's folder, names with line feeds between them, in threads, for the client that
// has compiled last: compilations of their programs take the executables from there. Without names the threads are
// ended, and what was not taken is freed; this must be done before main() ends. Without an adapter nothing happens.
XLA_GPU_EXPORT const char* xla_gpu_preload_executables(const char* names, int32_t threads);

// Names of the files that compilations of this process took executables from, or wrote, with line feeds between them;
// for the thread until its next call.
XLA_GPU_EXPORT const char* xla_gpu_used_executables(void);

// Appends bytes to the options of each program that is compiled through the adapter from now on, a serialised
// CompileOptionsProto; none: takes that back. Without an adapter nothing happens.
XLA_GPU_EXPORT const char* xla_gpu_append_compile_options(const char* bytes, size_t size);

// ---- Executions through the adapter, repeated without its client ----

typedef struct xla_gpu_launch xla_gpu_launch;  // an execution that was recorded
typedef struct xla_gpu_array xla_gpu_array;    // a buffer on each device of one

// Records the next execution through the adapter of a program with `num_results` results; -1: none after all.
XLA_GPU_EXPORT void xla_gpu_launch_record(int32_t num_results);

// What was recorded, with its number of arguments, or NULL; the caller's. Its executable is the client's, and so are
// the buffers of the arguments that are not replaced: they must stay as long as it is run.
XLA_GPU_EXPORT xla_gpu_launch* xla_gpu_launch_take_recorded(size_t* num_arguments);
XLA_GPU_EXPORT void xla_gpu_launch_destroy(xla_gpu_launch* launch);

// The buffers of an argument, or of a result, of the recorded execution. They stay the client's.
XLA_GPU_EXPORT xla_gpu_array* xla_gpu_launch_buffers(const xla_gpu_launch* launch, int32_t of_results, size_t index);

// Executes with inputs[i] as the argument places[i], where that is not negative. The last `num_state` inputs are
// donated: afterwards they hold the last `num_state` results. The others become `outputs`. Returns at once: a thread
// does this and what follows, in the order of the calls. What fails there is what xla_gpu_array_read of a result
// fails with, or of a later one that depends on it.
XLA_GPU_EXPORT const char* xla_gpu_launch_run(const xla_gpu_launch* launch, const int32_t* places,
                                              xla_gpu_array* const* inputs, size_t num_inputs, size_t num_state,
                                              xla_gpu_array** outputs);

// Copies `size` bytes of the host, a PJRT_Buffer_Type of these dimensions, to each device of the launch. The memory is
// the caller's again when this returns.
XLA_GPU_EXPORT const char* xla_gpu_array_make(const xla_gpu_launch* launch, const void* data, size_t size, int32_t type,
                                              const int64_t* dims, size_t num_dims, xla_gpu_array** array);

// Copies the first device's buffer, of `size` bytes, once it is computed: of a launch's state, what the last launch
// left.
XLA_GPU_EXPORT const char* xla_gpu_array_read(const xla_gpu_array* array, void* data, size_t size);
XLA_GPU_EXPORT void xla_gpu_array_destroy(xla_gpu_array* array);

// Waits until the thread has done all of that; to be called before the client goes.
XLA_GPU_EXPORT void xla_gpu_launch_wait(void);

// ---- Programs that the adapter executes in the place of others ----

typedef struct xla_gpu_execution xla_gpu_execution;  // on one device, that was recorded
typedef struct xla_gpu_proxy xla_gpu_proxy;

// From now on the buffers whose unsafe pointers the thread asks for are noted, and have none.
XLA_GPU_EXPORT void xla_gpu_execution_note(void);

// Records the next execution whose arguments are the noted buffers.
XLA_GPU_EXPORT const char* xla_gpu_execution_record(void);

// What was recorded, or NULL; the caller's. Its executable and buffers are the client's.
XLA_GPU_EXPORT xla_gpu_execution* xla_gpu_execution_take(void);
XLA_GPU_EXPORT void xla_gpu_execution_destroy(xla_gpu_execution* execution);

// The next execution whose arguments are the noted buffers is one of a proxy: it executes the program, and so does each
// later one of its executable. Argument i of the program is the proxy's argument places[i], or the one that was
// recorded where that is -1; it must stay as long as the proxy then. The results of both have the same dtypes and
// shapes.
XLA_GPU_EXPORT const char* xla_gpu_proxy_expect(const xla_gpu_execution* program, const int32_t* places,
                                                size_t num_places);

// The proxy, or NULL where there was no such execution; the caller's. The program's executable stays as long as it. It
// is to be destroyed when no execution of it is under way.
XLA_GPU_EXPORT xla_gpu_proxy* xla_gpu_proxy_take(void);
XLA_GPU_EXPORT void xla_gpu_proxy_destroy(xla_gpu_proxy* proxy);

// ---- Device memory shared with another framework, through the adapter ----

// The next transfer from each of `data`, addresses in device memory, to the adapter's client makes a buffer over this
// very memory, instead of a copy of host memory: once `stream` (a cudaStream_t of the other framework) has done what it
// holds at the first of these transfers. The memory must stay until its one of `ids` is among the released ones. An
// address that is announced already, or null, is an error, and none is announced then.
XLA_GPU_EXPORT const char* xla_gpu_import_buffers(const void* const* data, const int64_t* ids, size_t count,
                                                  void* stream);

// Takes announcements back that no transfer has used: writes the ids of these, and returns their number.
XLA_GPU_EXPORT size_t xla_gpu_import_cancel(const void* const* data, size_t count, int64_t* ids);

// As xla_gpu_import_buffers, but what becomes of the transfers are placeholders: executions get views of the memory
// that is bound to them instead, and fail while none is. `data` serves to recognise the transfers.
XLA_GPU_EXPORT const char* xla_gpu_import_placeholders(const void* const* data, const int64_t* ids, size_t count);

// Binds memory to placeholders for executions from now on, which start after what `stream` holds now. Null instead of
// an address, or of `data`, ends a binding.
XLA_GPU_EXPORT const char* xla_gpu_bind_placeholders(const int64_t* ids, const void* const* data, size_t count,
                                                     void* stream);

// The ids of imported buffers that the runtime has deleted, each once; returns their number, at most `capacity`.
XLA_GPU_EXPORT size_t xla_gpu_import_released(int64_t* ids, size_t capacity);

typedef struct xla_gpu_export_args {
  size_t struct_size;   // sizeof(this)
  int32_t device_type;  // DLPack's: 2 CUDA
  int32_t device_id;
  uint8_t dtype_code;  // DLPack's
  uint8_t dtype_bits;
  int32_t rank;
  const int64_t* dims;
  void* managed_tensor;  // out: a DLManagedTensor, whose deleter gives the buffer back
} xla_gpu_export_args;

// From now on the thread's calls of the client for buffers' addresses name, in their order, the buffers that its next
// xla_gpu_export_buffers exports, all or none. `stream`, of the other framework, waits for them.
XLA_GPU_EXPORT void xla_gpu_export_begin(void);
XLA_GPU_EXPORT const char* xla_gpu_export_buffers(xla_gpu_export_args* args, size_t count, void* stream);

// Buffers that were exported and are not given back yet.
XLA_GPU_EXPORT size_t xla_gpu_export_count(void);

// ---- Device groups: GPUs of one host that all_reduce among themselves ----

#define XLA_GPU_GROUP_HANDLE_BYTES 64

typedef struct xla_gpu_group_member {
  size_t struct_size;         // sizeof(xla_gpu_group_member)
  int64_t group;              // the number that the operators' attribute `group` names, the same for every rank; > 0
  int32_t ranks;              // 2 to 8
  int32_t rank;               // of this device: the order of summation
  int32_t device_ordinal;     // of this process
  int64_t timeout_ms;         // how long a call waits for a peer
  int64_t max_bytes;          // of a message; larger ones go in pieces. Takes 2 (2 ranks) or 4 times that. 0: default
  int64_t low_latency_bytes;  // up to which a message is sent whole to every peer. -1: the default
} xla_gpu_group_member;

// Allocates the memory through which peers reach this device, loads the kernels, and writes a handle of
// XLA_GPU_GROUP_HANDLE_BYTES bytes with which another process opens that memory. It is kept until the process ends:
// captured graphs hold its address.
XLA_GPU_EXPORT const char* xla_gpu_group_allocate(const xla_gpu_group_member* member, void* handle);

// Connects a device to its peers, all of which have been allocated. devices[ranks]: each rank's device ordinal in this
// process, or -1 for one of another process, whose handle is then handles[rank].
XLA_GPU_EXPORT const char* xla_gpu_group_connect(int64_t group, int32_t device_ordinal, const int32_t* devices,
                                                 const void* handles);

// NULL while no call of the group has timed out on a device of this process.
XLA_GPU_EXPORT const char* xla_gpu_group_error(int64_t group);

#ifdef __cplusplus
}
#endif

#endif  // XLA_GPU_RUNTIME_XLA_GPU_H_
