// A PJRT plug-in that is another PJRT plug-in, JAX's CUDA one, with a few entries of its table replaced, so that
// torch_xla 2.9 (PJRT API 0.7x of August 2025) can use it:
//  - The platform is called "gpu": torch_xla ends the process on any tensor of a device type called "CUDA".
//  - Compiled executables can be kept in files, see executable_cache.h.
//  - Structures that later versions of the API appended to are passed on in a larger, zero-filled copy: newer plug-ins
//    refuse the smaller ones ("expected 112, got 80").
//  - Of an executable's optimised HLO it gets parameters and result alone, see program_interface.h.
//  - The thread's current CUDA device stays what it was when a client starts, where the process uses it.
//  - Device memory of another framework enters and leaves as buffers: shared_buffers.h.
//  - A program can be executed in the place of another one that takes less: proxy_programs.h.
//  - An execution that fails returns buffers with its error: failed_executions.h.
// All else is the plug-in's own.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/runtime/adapter_errors.h"
#include "ffi/runtime/device.h"
#include "ffi/runtime/direct_launch.h"
#include "ffi/runtime/error.h"
#include "ffi/runtime/executable_cache.h"
#include "ffi/runtime/failed_executions.h"
#include "ffi/runtime/pjrt_abi.h"
#include "ffi/runtime/pjrt_abi_executables.h"
#include "ffi/runtime/pjrt_plugin.h"
#include "ffi/runtime/program_interface.h"
#include "ffi/runtime/proxy_programs.h"
#include "ffi/runtime/shared_buffers.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu::pjrt {
namespace {

// Set once, before any replaced entry can be called.
const Api* real_api = nullptr;
ExecutableCache* executable_cache = nullptr;

// A copy of `given` with room for what later versions of the API append. Zero means "not given" for all of it.
class GrownArgs {
 public:
  // A larger structure than this comes from a framework newer than this library, which needs no help.
  static constexpr size_t kSize = 512;
  static bool Fits(const void* given) {
    return given != nullptr && SizeOf(given) >= sizeof(Args) && SizeOf(given) < kSize;
  }

  explicit GrownArgs(const void* given) {
    std::memcpy(bytes_, given, SizeOf(given));
    args()->struct_size = kSize;
  }
  Args* args() { return reinterpret_cast<Args*>(bytes_); }

  // Hands the outputs back to the caller, whose structure keeps its own size.
  void CopyTo(void* given) const {
    std::memcpy(static_cast<char*>(given) + sizeof(size_t), bytes_ + sizeof(size_t), SizeOf(given) - sizeof(size_t));
  }

 private:
  static size_t SizeOf(const void* given) { return static_cast<const Args*>(given)->struct_size; }

  alignas(16) char bytes_[kSize] = {};
};

// XLA's start leaves the thread with the last device of several; to PyTorch, device="cuda" would be that one.
void* CreateClient(void* args) {
  const CurrentDeviceKept kept;
  return real_api->entries()[kClientCreate](args);
}

void* PlatformName(void* untyped) {
  auto* args = static_cast<ClientPlatformNameArgs*>(untyped);
  args->platform_name = "gpu";
  args->platform_name_size = 3;
  return nullptr;
}

void* Compile(void* untyped) {
  auto* args = static_cast<ClientCompileArgs*>(untyped);
  void* const given = args->executable;
  DirectLaunchUseClient(args->client);
  try {
    return executable_cache->Compile(args);
  } catch (...) {  // no memory for a copy of the program; XLA may still have enough
    if (args->executable != given) return nullptr;
    return real_api->entries()[kClientCompile](args);
  }
}

// Returns an error where it fails.
void* ExecuteOrRefuse(LoadedExecutableExecuteArgs* args) {
  if (void* error = ErrorOfArguments(*args)) return error;
  const BoundArguments bound(args);
  if (!bound.error().ok()) return RefusedBy(bound.error());
  if (!GrownArgs::Fits(args->options)) return ExecuteForClient(args);
  Args* const given = args->options;
  GrownArgs options(given);
  args->options = options.args();
  void* const error = ExecuteForClient(args);
  args->options = given;
  return error;
}

void* Execute(void* untyped) {
  auto* args = static_cast<LoadedExecutableExecuteArgs*>(untyped);
  if (args->struct_size < sizeof *args) return real_api->entries()[kLoadedExecutableExecute](args);
  void* const error = ExecuteOrRefuse(args);
  return error == nullptr ? nullptr : ReturnFailed(args, error);
}

template <size_t kEntry>
void* CallWithGrownArgs(void* args) {
  const Entry entry = real_api->entries()[kEntry];
  if (!GrownArgs::Fits(args)) return entry(args);
  GrownArgs grown(args);
  void* const error = entry(grown.args());
  grown.CopyTo(args);
  return error;
}

void* DeserializeAndLoad(void* args) {
  DirectLaunchUseClient(static_cast<const DeserializeAndLoadArgs*>(args)->client);
  return CallWithGrownArgs<kExecutableDeserializeAndLoad>(args);
}

// What the thread was told the size of, and gets with its next call.
struct PreparedProgram {
  const void* executable = nullptr;
  std::string bytes;
};
thread_local PreparedProgram prepared_program;

// Callers ask for the size first, and for the bytes then.
void* OptimizedProgram(void* untyped) {
  auto* args = static_cast<ExecutableOptimizedProgramArgs*>(untyped);
  const Entry entry = real_api->entries()[kExecutableOptimizedProgram];
  if (args->struct_size < sizeof *args || args->program == nullptr) return entry(args);
  Program* const program = args->program;
  PreparedProgram& prepared = prepared_program;
  if (program->code != nullptr) {
    if (prepared.executable != args->executable || program->code_size < prepared.bytes.size()) return entry(args);
    std::memcpy(const_cast<char*>(program->code), prepared.bytes.data(), prepared.bytes.size());
    program->code_size = prepared.bytes.size();
    prepared = {};
    return nullptr;
  }
  prepared = {};
  if (void* error = entry(args)) return error;
  try {
    std::string whole(program->code_size, 0);
    Program filled = *program;
    filled.code = whole.data();
    args->program = &filled;
    const Error error = TakeError(*real_api, entry(args));
    args->program = program;
    const std::string_view format(filled.format, filled.format_size);
    if (error.ok() && format == "hlo_with_config" && InterfaceOfProgram(whole, &prepared.bytes)) {
      prepared.executable = args->executable;
      program->code_size = prepared.bytes.size();
    }
  } catch (...) {  // no memory: the whole module, as the plug-in said
    args->program = program;
    prepared.executable = nullptr;
  }
  return nullptr;
}

// The adapter's table in front of `api`.
const Api* MakeTable(const Api& api, const std::string& path) {
  const size_t words = api.struct_size / sizeof(void*);
  void** const storage = new void*[words];  // for the rest of the process: threads of the plug-in may outlive main()
  std::memcpy(storage, &api, words * sizeof(void*));
  auto* table = reinterpret_cast<Api*>(storage);
  auto* entries = const_cast<Entry*>(table->entries());
  const auto replace = [&](size_t entry, Entry replacement) {
    if (entries[entry] != nullptr) entries[entry] = replacement;
  };
  replace(kClientCreate, CreateClient);
  replace(kClientPlatformName, PlatformName);
  replace(kClientCompile, Compile);
  replace(kLoadedExecutableExecute, Execute);
  replace(kExecutableDeserializeAndLoad, DeserializeAndLoad);
  replace(kExecutableOptimizedProgram, OptimizedProgram);
  replace(kExecutableGetCompiledMemoryStats, CallWithGrownArgs<kExecutableGetCompiledMemoryStats>);
  AdapterErrorsUse(entries, api.num_entries());
  if (BufferViewsUse(api)) {
    replace(kClientBufferFromHostBuffer, SharedBufferFromHostBuffer);
    replace(kBufferUnsafePointer, SharedBufferUnsafePointer);
    replace(kBufferDestroy, SharedBufferDestroy);
    replace(kEventDestroy, SharedEventDestroy);
    replace(kEventIsReady, SharedEventIsReady);
    replace(kEventError, SharedEventError);
    replace(kEventAwait, SharedEventAwait);
    replace(kEventOnReady, SharedEventOnReady);
    ProxiesUse(api, entries);
    FailedExecutionsUse(api, entries, api.num_entries());
  }
  real_api = &api;
  DirectLaunchUse(api);
  executable_cache = new ExecutableCache(api, path);
  return table;
}

// ---- When there is no plug-in ----

// GetPjrtApi() cannot fail, and frameworks use what it returns without looking. So without a plug-in they get a table
// whose every function fails with the reason.
std::string& FailureText() {
  static auto* const text = new std::string;
  return *text;
}

void* Fail(void*) { return &FailureText(); }
void* FailureDestroy(void*) { return nullptr; }
void* FailureMessage(void* untyped) {
  auto* args = static_cast<ErrorMessageArgs*>(untyped);
  args->message = FailureText().c_str();
  args->message_size = FailureText().size();
  return nullptr;
}
void* FailureGetCode(void* untyped) {
  static_cast<ErrorGetCodeArgs*>(untyped)->code = kFailedPrecondition;
  return nullptr;
}

const Api* FailingTable() {
  struct Table {
    Api api;
    Entry entries[200];  // more than the API of any framework that may come here
  };
  static const Table table = [] {
    Table made = {};
    made.api.struct_size = sizeof made;
    made.api.version = {sizeof(Version), nullptr, kMajor, kOldestMinor};
    for (Entry& entry : made.entries) entry = Fail;
    made.entries[kErrorDestroy] = FailureDestroy;
    made.entries[kErrorMessage] = FailureMessage;
    made.entries[kErrorGetCode] = FailureGetCode;
    return made;
  }();
  return &table.api;
}

// ---- Which plug-in ----

std::mutex mutex;  // of what follows
const Api* adapter_table = nullptr;
const std::string* adapter_path = nullptr;

Error UsePlugin(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex);
  if (adapter_table != nullptr) {
    if (path == *adapter_path) return {};
    return Error::FailedPrecondition("the plug-in " + *adapter_path + " is already in use; a process has one");
  }
  const Api* api = nullptr;
  if (Error error = LoadPlugin(path, &api); !error.ok()) return error;
  adapter_path = new std::string(path);
  adapter_table = MakeTable(*api, path);
  return {};
}

const Api* GetTable() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (adapter_table != nullptr) return adapter_table;
  }
  const char* path = std::getenv("XLA_GPU_PJRT_PLUGIN");
  Error error = path == nullptr || path[0] == '\0'
                    ? Error::FailedPrecondition(
                          "no PJRT plug-in was named; set XLA_GPU_PJRT_PLUGIN to the path of "
                          "JAX's xla_cuda_plugin.so, or let the xla_gpu package find it")
                    : UsePlugin(path);
  std::lock_guard<std::mutex> lock(mutex);
  if (adapter_table != nullptr) return adapter_table;
  FailureText() = "xla_gpu: " + error.message;
  return FailingTable();
}

}  // namespace
}  // namespace xla_gpu::pjrt

extern "C" const char* xla_gpu_pjrt_use_plugin(const char* path) {
  using xla_gpu::Error;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_pjrt_use_plugin", [&]() -> Error {
    if (path == nullptr || path[0] == '\0') return Error::InvalidArgument("the PJRT plug-in's path is null or empty");
    return xla_gpu::pjrt::UsePlugin(path);
  }));
}

extern "C" void xla_gpu_record_programs(int32_t on) {
  using namespace xla_gpu::pjrt;
  std::lock_guard<std::mutex> lock(mutex);
  if (executable_cache != nullptr) executable_cache->SetRecording(on != 0);
}

extern "C" const char* xla_gpu_append_compile_options(const char* bytes, size_t size) {
  using xla_gpu::Error;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_append_compile_options", [&]() -> Error {
    using namespace xla_gpu::pjrt;
    std::lock_guard<std::mutex> lock(mutex);
    if (executable_cache != nullptr)
      executable_cache->SetAppendedOptions(size == 0 ? std::string() : std::string(bytes, size));
    return {};
  }));
}

extern "C" const char* xla_gpu_compile_recorded(int32_t threads, int64_t* programs) {
  using xla_gpu::Error;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_compile_recorded", [&]() -> Error {
    using namespace xla_gpu::pjrt;
    *programs = executable_cache == nullptr ? 0 : static_cast<int64_t>(executable_cache->StartRecorded(threads));
    return {};
  }));
}

extern "C" const char* xla_gpu_finish_recorded(int32_t drop, int64_t* waiting) {
  using xla_gpu::Error;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_finish_recorded", [&]() -> Error {
    using namespace xla_gpu::pjrt;
    *waiting = executable_cache == nullptr ? 0 : static_cast<int64_t>(executable_cache->FinishRecorded(drop != 0));
    return {};
  }));
}

extern "C" const char* xla_gpu_preload_executables(const char* names, int32_t threads) {
  using xla_gpu::Error;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_preload_executables", [&]() -> Error {
    using namespace xla_gpu::pjrt;
    if (executable_cache == nullptr) return {};
    std::vector<std::string> listed;
    std::istringstream lines(names == nullptr ? "" : names);
    for (std::string name; std::getline(lines, name);) {
      // Files of the folder alone.
      if (!name.empty() && name.find('/') == std::string::npos) listed.push_back(name);
    }
    if (listed.empty()) {
      executable_cache->FinishPreloading();
    } else {
      executable_cache->StartPreloading(listed, threads);
    }
    return {};
  }));
}

extern "C" const char* xla_gpu_used_executables(void) {
  thread_local std::string text;
  try {
    text.clear();
    if (xla_gpu::pjrt::executable_cache != nullptr) {
      for (const std::string& name : xla_gpu::pjrt::executable_cache->UsedFiles()) text.append(name).append("\n");
    }
    return text.c_str();
  } catch (...) {  // no memory
    return "";
  }
}

// The entry point of a PJRT plug-in. Never null.
extern "C" XLA_GPU_EXPORT const void* GetPjrtApi() {
  try {
    return xla_gpu::pjrt::GetTable();
  } catch (...) {  // no memory
    return xla_gpu::pjrt::FailingTable();
  }
}
