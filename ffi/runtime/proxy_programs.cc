#include "ffi/runtime/proxy_programs.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/runtime/adapter_errors.h"
#include "ffi/runtime/direct_launch.h"
#include "ffi/runtime/error.h"
#include "ffi/runtime/executable_results.h"
#include "ffi/runtime/pjrt_abi_executables.h"
#include "ffi/runtime/xla_gpu.h"

using xla_gpu::Error;

// An execution on one device that was recorded, with the buffers that the client named.
struct xla_gpu_execution {
  void* executable;
  std::vector<void*> arguments;
};

namespace xla_gpu::pjrt {

struct Proxy {
  void* executable = nullptr;    // of the proxy, once it was executed
  void* program;                 // the executable behind it
  std::vector<void*> arguments;  // of the program
  std::vector<int32_t> places;   // for each, which argument of the proxy it is; -1: as it was recorded
  size_t num_arguments;          // of the proxy
};

namespace {

const Api* proxied_plugin = nullptr;  // set once, before an entry can be called
Entry unsafe_pointer = nullptr, destroy_executable = nullptr;
std::atomic<bool> in_use{false};

thread_local bool noting_buffers = false;
thread_local std::vector<void*> noted_buffers;

std::vector<void*> TakeNotedBuffers() {
  noting_buffers = false;
  return std::exchange(noted_buffers, {});
}

// A program that proxies stand for.
struct BehindProxies {
  int num_proxies = 0;
  bool destroyed = false;  // by the client; the plug-in's executable stays as long as a proxy of it
};

struct Tables {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<const Proxy>> proxies;  // by their executables
  std::unordered_map<void*, BehindProxies> programs;                // by their executables
  // The next execution with these arguments is recorded, or is one of `expected`.
  bool waiting = false;
  std::vector<void*> arguments;
  std::unique_ptr<xla_gpu_execution> recorded;
  std::shared_ptr<Proxy> expected, met;
};
Tables& TheTables() {
  static auto* const tables = new Tables;  // threads of the plug-in may outlive main()
  return *tables;
}

void* NoteUnsafePointer(void* untyped) {
  if (!noting_buffers) return unsafe_pointer(untyped);
  auto* args = static_cast<BufferArgs*>(untyped);
  noted_buffers.push_back(args->buffer);
  args->out = nullptr;
  return nullptr;
}

void DestroyExecutable(void* executable) {
  ExecutableDestroyArgs args = {};
  args.struct_size = sizeof args;
  args.executable = executable;
  destroy_executable(&args);
}

void* DestroyLoadedExecutable(void* untyped) {
  if (in_use.load(std::memory_order_acquire)) {
    void* const executable = static_cast<ExecutableDestroyArgs*>(untyped)->executable;
    std::lock_guard<std::mutex> lock(TheTables().mutex);
    TheTables().proxies.erase(executable);
    const auto program = TheTables().programs.find(executable);
    if (program != TheTables().programs.end()) {
      program->second.destroyed = true;
      return nullptr;
    }
  }
  return destroy_executable(untyped);
}

// Whether the execution is the one that is waited for. With the lock.
bool IsAwaited(const Tables& tables, const LoadedExecutableExecuteArgs& args) {
  return tables.waiting && args.num_devices == 1 && args.num_args == tables.arguments.size() &&
         std::equal(tables.arguments.begin(), tables.arguments.end(), args.argument_lists[0]);
}

Error CheckResults(void* proxy, void* program) {
  std::vector<ResultForm> of_proxy, of_program;
  if (Error error = FormsOfResults(*proxied_plugin, proxy, &of_proxy); !error.ok()) return error;
  if (Error error = FormsOfResults(*proxied_plugin, program, &of_program); !error.ok()) return error;
  if (of_proxy == of_program) return {};
  return Error::FailedPrecondition("a proxy has results of other dtypes or shapes than its program");
}

// The proxy that is executed; null: none. May begin a record of what is.
Error FindProxy(const LoadedExecutableExecuteArgs& args, std::shared_ptr<const Proxy>* proxy,
                std::unique_ptr<xla_gpu_execution>* record) {
  Tables& tables = TheTables();
  std::lock_guard<std::mutex> lock(tables.mutex);
  const auto found = tables.proxies.find(args.executable);
  if (found != tables.proxies.end()) {
    *proxy = found->second;
    return {};
  }
  if (!IsAwaited(tables, args)) return {};
  tables.waiting = false;
  if (tables.expected == nullptr) {
    *record = std::make_unique<xla_gpu_execution>(xla_gpu_execution{args.executable, std::move(tables.arguments)});
    return {};
  }
  std::shared_ptr<Proxy> met = std::move(tables.expected);
  if (tables.programs.find(args.executable) != tables.programs.end() || args.executable == met->program) {
    return Error::FailedPrecondition("a proxy's executable is another program's");
  }
  if (Error error = CheckResults(args.executable, met->program); !error.ok()) return error;
  met->executable = args.executable;
  tables.proxies.emplace(args.executable, met);
  ++tables.programs[met->program].num_proxies;
  tables.met = met;
  *proxy = std::move(met);
  return {};
}

void* ExecuteBehind(const Proxy& proxy, LoadedExecutableExecuteArgs* args) {
  if (args->num_devices != 1 || args->num_args != proxy.num_arguments) {
    return RefusedBy(Error::FailedPrecondition("a proxy was made for one device and " +
                                               std::to_string(proxy.num_arguments) + " arguments, and is executed on " +
                                               std::to_string(args->num_devices) + " with " +
                                               std::to_string(args->num_args)));
  }
  std::vector<void*> arguments = proxy.arguments;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (proxy.places[i] >= 0) arguments[i] = args->argument_lists[0][proxy.places[i]];
  }
  void* const* argument_list = arguments.data();
  LoadedExecutableExecuteArgs behind = *args;  // with the lists of results
  behind.executable = proxy.program;
  behind.argument_lists = &argument_list;
  behind.num_args = arguments.size();
  return ExecuteRecorded(&behind);
}

void RemoveProxy(const Proxy& proxy) {
  Tables& tables = TheTables();
  std::unique_lock<std::mutex> lock(tables.mutex);
  const auto found = tables.proxies.find(proxy.executable);
  if (found != tables.proxies.end() && found->second.get() == &proxy) tables.proxies.erase(found);
  const auto behind = tables.programs.find(proxy.program);
  if (--behind->second.num_proxies > 0) return;
  const bool destroy = behind->second.destroyed;
  tables.programs.erase(behind);
  lock.unlock();
  if (destroy) DestroyExecutable(proxy.program);
}

// Waits for the execution whose arguments are the noted buffers.
Error AwaitExecution(std::shared_ptr<Proxy> expected) {
  std::vector<void*> arguments = TakeNotedBuffers();
  if (proxied_plugin == nullptr) return Error::FailedPrecondition("no PJRT plug-in for proxies is in use");
  Tables& tables = TheTables();
  std::lock_guard<std::mutex> lock(tables.mutex);
  if (expected != nullptr) expected->num_arguments = arguments.size();
  for (const int32_t place : expected != nullptr ? expected->places : std::vector<int32_t>()) {
    if (place >= static_cast<int32_t>(arguments.size())) {
      return Error::InvalidArgument("xla_gpu_proxy_expect: no argument " + std::to_string(place));
    }
  }
  in_use.store(true, std::memory_order_release);
  tables.arguments = std::move(arguments);
  tables.recorded.reset();
  tables.met.reset();
  tables.expected = std::move(expected);
  tables.waiting = true;
  return {};
}

}  // namespace

void ProxiesUse(const Api& api, Entry* entries) {
  for (size_t entry : {kLoadedExecutableDestroy, kBufferUnsafePointer, kExecutableOutputElementTypes,
                       kExecutableOutputDimensions, kLoadedExecutableGetExecutable}) {
    if (entries[entry] == nullptr) return;
  }
  unsafe_pointer = std::exchange(entries[kBufferUnsafePointer], NoteUnsafePointer);
  destroy_executable = std::exchange(entries[kLoadedExecutableDestroy], DestroyLoadedExecutable);
  proxied_plugin = &api;
}

void* ExecuteForClient(LoadedExecutableExecuteArgs* args) {
  if (!in_use.load(std::memory_order_acquire)) return ExecuteRecorded(args);
  void* failed = nullptr;
  const Error error = Guarded("an execution", [&]() -> Error {
    std::shared_ptr<const Proxy> proxy;
    std::unique_ptr<xla_gpu_execution> record;
    if (Error refused = FindProxy(*args, &proxy, &record); !refused.ok()) return refused;
    failed = proxy != nullptr ? ExecuteBehind(*proxy, args) : ExecuteRecorded(args);
    if (failed == nullptr && record != nullptr) {
      std::lock_guard<std::mutex> lock(TheTables().mutex);
      TheTables().recorded = std::move(record);
    }
    return {};
  });
  return error.ok() ? failed : RefusedBy(error);
}

}  // namespace xla_gpu::pjrt

struct xla_gpu_proxy {
  std::shared_ptr<const xla_gpu::pjrt::Proxy> proxy;
};

using namespace xla_gpu::pjrt;
using xla_gpu::Guarded;
using xla_gpu::Report;

extern "C" void xla_gpu_execution_note(void) {
  noting_buffers = true;
  noted_buffers.clear();
}

extern "C" const char* xla_gpu_execution_record(void) {
  return Report(Guarded("xla_gpu_execution_record", [] { return AwaitExecution(nullptr); }));
}

extern "C" xla_gpu_execution* xla_gpu_execution_take(void) {
  TakeNotedBuffers();
  std::lock_guard<std::mutex> lock(TheTables().mutex);
  TheTables().waiting = false;
  return TheTables().recorded.release();
}

extern "C" void xla_gpu_execution_destroy(xla_gpu_execution* execution) { delete execution; }

extern "C" const char* xla_gpu_proxy_expect(const xla_gpu_execution* program, const int32_t* places,
                                            size_t num_places) {
  return Report(Guarded("xla_gpu_proxy_expect", [&]() -> Error {
    if (num_places != program->arguments.size()) {
      return Error::InvalidArgument("xla_gpu_proxy_expect: expected " + std::to_string(program->arguments.size()) +
                                    " places, got " + std::to_string(num_places));
    }
    auto proxy = std::make_shared<Proxy>();
    proxy->program = program->executable;
    proxy->arguments = program->arguments;
    proxy->places.assign(places, places + num_places);
    return AwaitExecution(std::move(proxy));
  }));
}

extern "C" xla_gpu_proxy* xla_gpu_proxy_take(void) {
  TakeNotedBuffers();
  Tables& tables = TheTables();
  std::lock_guard<std::mutex> lock(tables.mutex);
  tables.waiting = false;
  tables.expected.reset();
  return tables.met == nullptr ? nullptr : new xla_gpu_proxy{std::move(tables.met)};
}

extern "C" void xla_gpu_proxy_destroy(xla_gpu_proxy* proxy) {
  Guarded("xla_gpu_proxy_destroy", [&]() -> Error {
    const std::unique_ptr<xla_gpu_proxy> handle(proxy);
    RemoveProxy(*handle->proxy);
    return {};
  });
}
