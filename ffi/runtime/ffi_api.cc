#include "ffi/runtime/ffi_api.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "ffi/host/thread_pool.h"
#include "ffi/runtime/device.h"

namespace {

using xla_gpu::Error;

int64_t NextRunId() {
  static std::atomic<int64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Returned where there is no memory for an error; never deleted.
XLA_FFI_Error* OutOfMemory() {
  static XLA_FFI_Error error{{XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "out of memory"}};
  return &error;
}

void DeleteError(XLA_FFI_Error* error) {
  if (error != OutOfMemory()) delete error;
}

// An error for a handler, or null for success.
XLA_FFI_Error* MakeError(Error error) noexcept {
  if (error.ok()) return nullptr;
  try {
    return new XLA_FFI_Error{std::move(error)};
  } catch (...) {
    return OutOfMemory();
  }
}

// Whether `args` has a member ctx, and that is null: a handler called for its metadata has no context to ask.
template <typename Args>
auto LacksContext(const Args* args, int) -> decltype(args->ctx == nullptr) {
  return args->ctx == nullptr;
}
template <typename Args>
bool LacksContext(const Args*, long) {
  return false;
}

// What all functions of the table do: check the size of their arguments' struct, call `body`, catch exceptions.
template <typename Args, typename Body>
XLA_FFI_Error* Serve(const char* name, Args* args, size_t expected_size, Body&& body) noexcept {
  return MakeError(xla_gpu::Guarded(name, [&]() -> Error {
    if (args == nullptr) return Error::InvalidArgument(std::string(name) + ": null arguments");
    if (args->struct_size < expected_size) {
      return Error::InvalidArgument(std::string(name) + ": struct of " + std::to_string(args->struct_size) +
                                    " bytes, expected at least " + std::to_string(expected_size));
    }
    if (LacksContext(args, 0)) return Error::InvalidArgument(std::string(name) + ": ctx is null");
    return body();
  }));
}

// ---- Errors ----

XLA_FFI_Error* ErrorCreate(XLA_FFI_Error_Create_Args* args) {
  return MakeError(xla_gpu::Guarded("XLA_FFI_Error_Create", [&]() -> Error {
    // An error of code OK would read as success; XLA's own runtime has no such error either.
    const XLA_FFI_Error_Code code = args->errc == XLA_FFI_Error_Code_OK ? XLA_FFI_Error_Code_UNKNOWN : args->errc;
    return {code, args->message != nullptr && args->message[0] != '\0' ? args->message : "the handler failed"};
  }));
}

void ErrorGetMessage(XLA_FFI_Error_GetMessage_Args* args) {
  args->message = args->error != nullptr ? args->error->error.message.c_str() : "";
}

void ErrorDestroy(XLA_FFI_Error_Destroy_Args* args) { DeleteError(args->error); }

// ---- Registration ----

XLA_FFI_Error* HandlerRegister(XLA_FFI_Handler_Register_Args* args) {
  return Serve("XLA_FFI_Handler_Register", args, XLA_FFI_Handler_Register_Args_STRUCT_SIZE, []() -> Error {
    return Error::Unimplemented("handlers of eager calls are not registered; each call names its own");
  });
}

XLA_FFI_Error* TypeIdRegister(XLA_FFI_TypeId_Register_Args* args) {
  constexpr char kName[] = "XLA_FFI_TypeId_Register";
  return Serve(kName, args, XLA_FFI_TypeId_Register_Args_STRUCT_SIZE, [&]() -> Error {
    if (args->type_id == nullptr) return Error::InvalidArgument(std::string(kName) + ": type_id is null");
    static std::mutex mutex;
    static auto* const ids = new std::map<std::string, int64_t>;
    std::string name(args->name.ptr != nullptr ? args->name.ptr : "", args->name.ptr != nullptr ? args->name.len : 0);
    std::lock_guard<std::mutex> lock(mutex);
    if (auto known = ids->find(name); known != ids->end()) {
      if (args->type_id->type_id != 0 && args->type_id->type_id != known->second) {
        return Error::InvalidArgument("type " + name + " is registered with id " + std::to_string(known->second) +
                                      ", not " + std::to_string(args->type_id->type_id));
      }
      args->type_id->type_id = known->second;
      return {};
    }
    const auto taken = [&](int64_t id) {
      return std::any_of(ids->begin(), ids->end(), [&](const auto& entry) { return entry.second == id; });
    };
    int64_t id = args->type_id->type_id;
    if (id != 0 && taken(id)) {
      return Error::InvalidArgument("type id " + std::to_string(id) + " of " + name + " belongs to another type");
    }
    if (id == 0) {
      do ++id;
      while (taken(id));
    }
    (*ids)[name] = id;
    args->type_id->type_id = id;
    return {};
  });
}

// ---- Context: stream, device, run, user data ----

XLA_FFI_Error* StreamGet(XLA_FFI_Stream_Get_Args* args) {
  return Serve("XLA_FFI_Stream_Get", args, XLA_FFI_Stream_Get_Args_STRUCT_SIZE, [&]() -> Error {
    if (args->ctx->on_host()) return Error::FailedPrecondition("a call on the host has no stream");
    args->stream = args->ctx->stream;
    return {};
  });
}

XLA_FFI_Error* DeviceOrdinalGet(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  return Serve("XLA_FFI_DeviceOrdinal_Get", args, XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, [&]() -> Error {
    // The host is device 0 of its platform, as in XLA's CPU client.
    args->device_ordinal = std::max(args->ctx->device_ordinal, 0);
    return {};
  });
}

XLA_FFI_Error* RunIdGet(XLA_FFI_RunId_Get_Args* args) {
  return Serve("XLA_FFI_RunId_Get", args, XLA_FFI_RunId_Get_Args_STRUCT_SIZE, [&]() -> Error {
    args->run_id = args->ctx->run_id;
    return {};
  });
}

XLA_FFI_Error* ExecutionContextGet(XLA_FFI_ExecutionContext_Get_Args* args) {
  return Serve("XLA_FFI_ExecutionContext_Get", args, XLA_FFI_ExecutionContext_Get_Args_STRUCT_SIZE, []() -> Error {
    return Error::Unimplemented(
        "the handler asks for user data of an execution context, which only an XLA runtime has; call it through "
        "torch_xla or JAX");
  });
}

// ---- State ----

XLA_FFI_Error* StateSet(XLA_FFI_State_Set_Args* args) {
  constexpr char kName[] = "XLA_FFI_State_Set";
  return Serve(kName, args, XLA_FFI_State_Set_Args_STRUCT_SIZE, [&]() -> Error {
    if (args->type_id == nullptr || args->state == nullptr || args->deleter == nullptr) {
      return Error::InvalidArgument(std::string(kName) + ": type_id, state or deleter is null");
    }
    std::lock_guard<std::mutex> lock(args->ctx->mutex);
    if (args->ctx->state != nullptr) {
      return {XLA_FFI_Error_Code_ALREADY_EXISTS, std::string(kName) + ": the state is already set"};
    }
    args->ctx->state = args->state;
    args->ctx->state_type = args->type_id->type_id;
    args->ctx->state_deleter = args->deleter;
    return {};
  });
}

XLA_FFI_Error* StateGet(XLA_FFI_State_Get_Args* args) {
  constexpr char kName[] = "XLA_FFI_State_Get";
  return Serve(kName, args, XLA_FFI_State_Get_Args_STRUCT_SIZE, [&]() -> Error {
    if (args->type_id == nullptr) return Error::InvalidArgument(std::string(kName) + ": type_id is null");
    std::lock_guard<std::mutex> lock(args->ctx->mutex);
    if (args->ctx->state == nullptr) {
      return {XLA_FFI_Error_Code_NOT_FOUND,
              std::string(kName) + ": no state is set; a handler with state needs its instantiate stage"};
    }
    if (args->ctx->state_type != args->type_id->type_id) {
      return Error::InvalidArgument(std::string(kName) + ": the state has type id " +
                                    std::to_string(args->ctx->state_type) + ", not " +
                                    std::to_string(args->type_id->type_id));
    }
    args->state = args->ctx->state;
    return {};
  });
}

// ---- Memory ----

XLA_FFI_Error* DeviceMemoryAllocate(XLA_FFI_DeviceMemory_Allocate_Args* args) {
  return Serve("XLA_FFI_DeviceMemory_Allocate", args, XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE, [&]() -> Error {
    XLA_FFI_ExecutionContext& context = *args->ctx;
    std::lock_guard<std::mutex> lock(context.mutex);
    context.allocations.reserve(context.allocations.size() + 1);  // so that nothing below can fail halfway
    void* data = nullptr;
    Error error = xla_gpu::AllocateMemory(context.device_ordinal, context.stream, args->size, args->alignment, &data);
    if (!error.ok()) return error;
    if (data != nullptr) context.allocations.push_back(data);
    args->data = data;
    return {};
  });
}

XLA_FFI_Error* DeviceMemoryFree(XLA_FFI_DeviceMemory_Free_Args* args) {
  constexpr char kName[] = "XLA_FFI_DeviceMemory_Free";
  return Serve(kName, args, XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE, [&]() -> Error {
    if (args->data == nullptr) return {};
    XLA_FFI_ExecutionContext& context = *args->ctx;
    std::lock_guard<std::mutex> lock(context.mutex);
    auto found = std::find(context.allocations.begin(), context.allocations.end(), args->data);
    if (found == context.allocations.end()) {
      return Error::InvalidArgument(std::string(kName) + ": the memory was not allocated by this call");
    }
    context.allocations.erase(found);
    return xla_gpu::FreeMemory(context.device_ordinal, context.stream, args->data);
  });
}

// ---- Threads ----

// As in XLA:GPU. Handlers' helpers then run the task on the calling thread.
Error NoThreadPool() { return Error::FailedPrecondition("a call on a CUDA device has no thread pool"); }

XLA_FFI_Error* ThreadPoolSchedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  return Serve("XLA_FFI_ThreadPool_Schedule", args, XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, [&]() -> Error {
    if (!args->ctx->on_host()) return NoThreadPool();
    xla_gpu::ThreadPool::Instance().Schedule([task = args->task, data = args->data] { task(data); });
    return {};
  });
}

XLA_FFI_Error* ThreadPoolNumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  return Serve("XLA_FFI_ThreadPool_NumThreads", args, XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, [&]() -> Error {
    if (!args->ctx->on_host()) return NoThreadPool();
    *args->num_threads = xla_gpu::ThreadPool::Instance().num_threads();
    return {};
  });
}

// ---- Futures ----

void Complete(XLA_FFI_Future* future, Error error) {
  // Holds the state itself: the waiter may delete `future` between the notification and the end of this function.
  const std::shared_ptr<XLA_FFI_Future::State> state = future->state;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->error = std::move(error);
    state->done = true;
  }
  state->completed.notify_all();
}

XLA_FFI_Error* FutureCreate(XLA_FFI_Future_Create_Args* args) {
  // The headers end the struct's size before `future`.
  return Serve("XLA_FFI_Future_Create", args, XLA_FFI_Future_Create_Args_STRUCT_SIZE, [&]() -> Error {
    args->future = new XLA_FFI_Future;
    return {};
  });
}

XLA_FFI_Error* FutureSetAvailable(XLA_FFI_Future_SetAvailable_Args* args) {
  return Serve("XLA_FFI_Future_SetAvailable", args, XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE, [&]() -> Error {
    Complete(args->future, {});
    return {};
  });
}

XLA_FFI_Error* FutureSetError(XLA_FFI_Future_SetError_Args* args) {
  constexpr char kName[] = "XLA_FFI_Future_SetError";
  return Serve(kName, args, XLA_FFI_Future_SetError_Args_STRUCT_SIZE, [&]() -> Error {
    Error error = xla_gpu::TakeError(args->error);
    if (error.ok()) error = {XLA_FFI_Error_Code_UNKNOWN, std::string(kName) + ": no error was given"};
    Complete(args->future, std::move(error));
    return {};
  });
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  api.api_version.major_version = XLA_FFI_API_MAJOR;
  api.api_version.minor_version = XLA_FFI_API_MINOR;
  api.XLA_FFI_Error_Create = ErrorCreate;
  api.XLA_FFI_Error_GetMessage = ErrorGetMessage;
  api.XLA_FFI_Error_Destroy = ErrorDestroy;
  api.XLA_FFI_Handler_Register = HandlerRegister;
  api.XLA_FFI_Stream_Get = StreamGet;
  api.XLA_FFI_TypeId_Register = TypeIdRegister;
  api.XLA_FFI_ExecutionContext_Get = ExecutionContextGet;
  api.XLA_FFI_State_Set = StateSet;
  api.XLA_FFI_State_Get = StateGet;
  api.XLA_FFI_DeviceMemory_Allocate = DeviceMemoryAllocate;
  api.XLA_FFI_DeviceMemory_Free = DeviceMemoryFree;
  api.XLA_FFI_ThreadPool_Schedule = ThreadPoolSchedule;
  api.XLA_FFI_ThreadPool_NumThreads = ThreadPoolNumThreads;
  api.XLA_FFI_Future_Create = FutureCreate;
  api.XLA_FFI_Future_SetAvailable = FutureSetAvailable;
  api.XLA_FFI_Future_SetError = FutureSetError;
  api.XLA_FFI_RunId_Get = RunIdGet;
  api.XLA_FFI_DeviceOrdinal_Get = DeviceOrdinalGet;
  return api;
}

}  // namespace

XLA_FFI_ExecutionContext::XLA_FFI_ExecutionContext(void* stream, int32_t device_ordinal)
    : stream(stream), device_ordinal(device_ordinal), run_id(NextRunId()) {}

XLA_FFI_ExecutionContext::~XLA_FFI_ExecutionContext() {
  // The state may own memory that it allocated through the context, so it goes first. A deleter that throws would end
  // the process here.
  if (state != nullptr) {
    xla_gpu::Guarded("the state's deleter", [this]() -> Error {
      state_deleter(state);
      return {};
    });
  }
  // On CUDA in the order of the stream: kernels that still use the memory run before it is freed. A failure has been
  // reported by the launch that caused it.
  for (void* data : allocations) xla_gpu::FreeMemory(device_ordinal, stream, data);
}

namespace xla_gpu {

const XLA_FFI_Api* FfiApi() {
  static const XLA_FFI_Api api = MakeApi();
  return &api;
}

Error TakeError(XLA_FFI_Error* error) {
  if (error == nullptr) return {};
  if (error == OutOfMemory()) return error->error;
  const std::unique_ptr<XLA_FFI_Error> owned(error);
  return std::move(owned->error);
}

Error TakeFuture(XLA_FFI_Future* future) {
  const std::unique_ptr<XLA_FFI_Future> owned(future);
  const std::shared_ptr<XLA_FFI_Future::State> state = future->state;
  std::unique_lock<std::mutex> lock(state->mutex);
  state->completed.wait(lock, [&] { return state->done; });
  return std::move(state->error);
}

}  // namespace xla_gpu
