#include "ffi/runtime/proxy_programs.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/runtime/buffer_views.h"
#include "ffi/runtime/current_buffers.h"
#include "ffi/runtime/direct_launch.h"
#include "ffi/runtime/error.h"
#include "ffi/runtime/xla_gpu.h"

using xla_gpu::Error;

// An execution on one device that was recorded, with the buffers that the client named.
struct xla_gpu_execution {
  void* executable;
  std::vector<void*> arguments;
  size_t num_results;
};

namespace xla_gpu::pjrt {

struct Proxy {
  void* executable;              // of the proxy
  void* program;                 // the executable behind it
  std::vector<void*> arguments;  // of the program
  std::vector<int32_t> places;   // for each, which argument of the proxy it is; -1: as it was recorded
  std::vector<int32_t> results;  // for each result of the program, which of the proxy it is; ~i: updates argument i
  size_t num_arguments;          // of the proxy
};

namespace {

Entry destroy_executable = nullptr;  // of the plug-in; set once, before an entry can be called

// A program that proxies stand for.
struct BehindProxies {
  size_t num_results = 0;
  int num_proxies = 0;
  bool destroyed = false;  // by the client; the plug-in's executable stays as long as a proxy of it
};

struct Tables {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<const Proxy>> proxies;  // by their executables
  std::unordered_map<void*, BehindProxies> programs;                // by their executables
  bool recording = false;
  std::vector<void*> to_record;  // the arguments of the execution
  size_t results_to_record = 0;
  std::unique_ptr<xla_gpu_execution> recorded;
};
Tables& TheTables() {
  static auto* const tables = new Tables;  // threads of the plug-in may outlive main()
  return *tables;
}

void DestroyExecutable(void* executable) {
  ExecutableDestroyArgs args = {};
  args.struct_size = sizeof args;
  args.executable = executable;
  destroy_executable(&args);
}

void* DestroyLoadedExecutable(void* untyped) {
  if (CurrentBuffersInUse()) {
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

// Arguments with the buffers behind them, which stay as long as this.
class CurrentArguments {
 public:
  explicit CurrentArguments(const LoadedExecutableExecuteArgs& args)
      : lists_(args.num_devices), pointers_(args.num_devices) {
    const auto lock = TheCurrentBuffers().Lock();
    for (size_t device = 0; device < args.num_devices; ++device) {
      void* const* const given = args.argument_lists[device];
      lists_[device].assign(given, given + args.num_args);
      for (void*& buffer : lists_[device]) buffer = TheCurrentBuffers().Of(buffer, &kept_);
      pointers_[device] = lists_[device].data();
    }
  }
  void* const* const* lists() const { return pointers_.data(); }

 private:
  std::vector<std::vector<void*>> lists_;
  std::vector<void* const*> pointers_;
  KeptBuffers kept_;
};

// The record of an execution, if it is the one to be recorded; null: it is not.
std::unique_ptr<xla_gpu_execution> TakeToRecord(Tables& tables, const LoadedExecutableExecuteArgs& args) {
  std::lock_guard<std::mutex> lock(tables.mutex);
  if (!tables.recording || args.num_devices != 1 || args.num_args != tables.to_record.size()) return nullptr;
  if (!std::equal(tables.to_record.begin(), tables.to_record.end(), args.argument_lists[0])) return nullptr;
  auto record = std::make_unique<xla_gpu_execution>(xla_gpu_execution{args.executable, {}, tables.results_to_record});
  record->arguments = std::move(tables.to_record);
  tables.recording = false;
  return record;
}

// An execution that is no proxy's. What a program behind one returns may be updated in place later.
void* ExecuteProgram(LoadedExecutableExecuteArgs* args) {
  Tables& tables = TheTables();
  std::unique_ptr<xla_gpu_execution> record = TakeToRecord(tables, *args);
  const CurrentArguments current(*args);
  void* const* const* const given = args->argument_lists;
  args->argument_lists = current.lists();
  void* const error = ExecuteRecorded(args);
  args->argument_lists = given;
  if (error != nullptr || args->num_devices != 1) return error;
  size_t num_results = 0;
  {
    std::lock_guard<std::mutex> lock(tables.mutex);
    if (record != nullptr) {
      num_results = record->num_results;
      tables.recorded = std::move(record);
    } else if (const auto program = tables.programs.find(args->executable); program != tables.programs.end()) {
      num_results = program->second.num_results;
    }
  }
  const auto lock = TheCurrentBuffers().Lock();
  for (size_t i = 0; i < num_results; ++i) TheCurrentBuffers().Add(args->output_lists[0][i]);
  return nullptr;
}

// What the program behind the proxy is executed with.
Error ArgumentsBehind(const Proxy& proxy, const LoadedExecutableExecuteArgs& args, std::vector<void*>* arguments,
                      KeptBuffers* kept) {
  if (args.num_devices != 1 || args.num_args != proxy.num_arguments) {
    return Error::FailedPrecondition("a proxy was recorded on one device with " + std::to_string(proxy.num_arguments) +
                                     " arguments, and is executed on " + std::to_string(args.num_devices) + " with " +
                                     std::to_string(args.num_args));
  }
  void* const* const given = args.argument_lists[0];
  const auto lock = TheCurrentBuffers().Lock();
  std::vector<void*> updated;
  for (const int32_t result : proxy.results) {
    if (result >= 0) continue;
    void* const buffer = given[~result];
    if (!TheCurrentBuffers().Has(buffer)) {
      return Error::FailedPrecondition("argument " + std::to_string(~result) +
                                       " of a proxy would be updated in place, and is no result of a program of jit");
    }
    updated.push_back(buffer);
  }
  std::sort(updated.begin(), updated.end());
  if (std::adjacent_find(updated.begin(), updated.end()) != updated.end()) {
    return Error::InvalidArgument("two arguments of a proxy that would be updated in place are one buffer");
  }
  for (size_t i = 0; i < proxy.places.size(); ++i) {
    void* const buffer = proxy.places[i] < 0 ? proxy.arguments[i] : given[proxy.places[i]];
    arguments->push_back(TheCurrentBuffers().Of(buffer, kept));
  }
  return {};
}

void* ExecuteProxy(const Proxy& proxy, LoadedExecutableExecuteArgs* args) {
  std::vector<void*> arguments;
  KeptBuffers kept;  // destroyed without the lock
  if (Error error = ArgumentsBehind(proxy, *args, &arguments, &kept); !error.ok()) return RefusedBy(error);
  std::vector<void*> results(proxy.results.size());
  void* const* argument_list = arguments.data();
  void** result_list = results.data();
  LoadedExecutableExecuteArgs behind = *args;
  behind.executable = proxy.program;
  behind.argument_lists = &argument_list;
  behind.num_args = arguments.size();
  behind.output_lists = &result_list;
  if (void* error = ExecuteRecorded(&behind)) return error;
  const auto lock = TheCurrentBuffers().Lock();
  for (size_t i = 0; i < results.size(); ++i) {
    const int32_t result = proxy.results[i];
    if (result >= 0) {
      args->output_lists[0][result] = results[i];
      TheCurrentBuffers().Add(results[i]);
    } else {
      TheCurrentBuffers().Update(args->argument_lists[0][~result], results[i], &kept);
    }
  }
  return nullptr;
}

Error CheckProxy(const Proxy& proxy, size_t num_results) {
  const auto num_arguments = static_cast<int32_t>(proxy.num_arguments);
  for (const int32_t place : proxy.places) {
    if (place >= num_arguments) {
      return Error::InvalidArgument("xla_gpu_proxy_make: no argument " + std::to_string(place));
    }
  }
  std::vector<int> returned(num_results);
  for (const int32_t result : proxy.results) {
    if (result < 0 ? ~result >= num_arguments : static_cast<size_t>(result) >= num_results) {
      return Error::InvalidArgument("xla_gpu_proxy_make: no result " + std::to_string(result));
    }
    if (result >= 0) ++returned[static_cast<size_t>(result)];
  }
  if (std::any_of(returned.begin(), returned.end(), [](int count) { return count != 1; })) {
    return Error::InvalidArgument("xla_gpu_proxy_make: expected each result of the proxy once");
  }
  return {};
}

Error AddProxy(const std::shared_ptr<const Proxy>& proxy) {
  Tables& tables = TheTables();
  std::lock_guard<std::mutex> lock(tables.mutex);
  if (proxy->executable == proxy->program || !tables.proxies.emplace(proxy->executable, proxy).second) {
    return Error::FailedPrecondition("xla_gpu_proxy_make: the proxy's executable is another one's");
  }
  BehindProxies& behind = tables.programs[proxy->program];
  behind.num_results = proxy->results.size();
  ++behind.num_proxies;
  return {};
}

void RemoveProxy(const std::shared_ptr<const Proxy>& proxy) {
  Tables& tables = TheTables();
  std::unique_lock<std::mutex> lock(tables.mutex);
  const auto found = tables.proxies.find(proxy->executable);
  if (found != tables.proxies.end() && found->second == proxy) tables.proxies.erase(found);
  const auto behind = tables.programs.find(proxy->program);
  if (--behind->second.num_proxies > 0) return;
  const bool destroy = behind->second.destroyed;
  tables.programs.erase(behind);
  lock.unlock();
  if (destroy) DestroyExecutable(proxy->program);
}

}  // namespace

void ProxiesUse(Entry* entries, size_t num_entries) {
  if (num_entries <= kBufferCopyToMemory || entries[kLoadedExecutableDestroy] == nullptr) return;
  WrapBufferEntries(entries);
  destroy_executable = std::exchange(entries[kLoadedExecutableDestroy], DestroyLoadedExecutable);
}

void* ExecuteForClient(LoadedExecutableExecuteArgs* args) {
  if (!CurrentBuffersInUse()) return ExecuteRecorded(args);
  void* failed = nullptr;
  const Error error = Guarded("an execution", [&]() -> Error {
    std::shared_ptr<const Proxy> proxy;
    {
      std::lock_guard<std::mutex> lock(TheTables().mutex);
      const auto found = TheTables().proxies.find(args->executable);
      if (found != TheTables().proxies.end()) proxy = found->second;
    }
    failed = proxy == nullptr ? ExecuteProgram(args) : ExecuteProxy(*proxy, args);
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

extern "C" void xla_gpu_execution_note(void) { NoteBuffers(); }

extern "C" const char* xla_gpu_execution_record(size_t num_results) {
  return Report(Guarded("xla_gpu_execution_record", [&]() -> Error {
    std::vector<void*> arguments = TakeNotedBuffers();
    if (!HaveCurrentBuffers()) return Error::FailedPrecondition("no PJRT plug-in for proxies is in use");
    Tables& tables = TheTables();
    std::lock_guard<std::mutex> lock(tables.mutex);
    UseCurrentBuffers();
    tables.to_record = std::move(arguments);
    tables.results_to_record = num_results;
    tables.recorded.reset();
    tables.recording = true;
    return {};
  }));
}

extern "C" xla_gpu_execution* xla_gpu_execution_take(void) {
  TakeNotedBuffers();
  std::lock_guard<std::mutex> lock(TheTables().mutex);
  TheTables().recording = false;
  return TheTables().recorded.release();
}

extern "C" void xla_gpu_execution_destroy(xla_gpu_execution* execution) { delete execution; }

extern "C" const char* xla_gpu_proxy_make(const xla_gpu_execution* proxy, const xla_gpu_execution* program,
                                          const int32_t* places, const int32_t* results, xla_gpu_proxy** made) {
  return Report(Guarded("xla_gpu_proxy_make", [&]() -> Error {
    const auto shared = std::make_shared<Proxy>(Proxy{proxy->executable, program->executable, program->arguments,
                                                      std::vector<int32_t>(places, places + program->arguments.size()),
                                                      std::vector<int32_t>(results, results + program->num_results),
                                                      proxy->arguments.size()});
    if (Error error = CheckProxy(*shared, proxy->num_results); !error.ok()) return error;
    auto handle = std::make_unique<xla_gpu_proxy>(xla_gpu_proxy{shared});
    if (Error error = AddProxy(shared); !error.ok()) return error;
    *made = handle.release();
    return {};
  }));
}

extern "C" void xla_gpu_proxy_destroy(xla_gpu_proxy* proxy) {
  Guarded("xla_gpu_proxy_destroy", [&]() -> Error {
    const std::unique_ptr<xla_gpu_proxy> handle(proxy);
    RemoveProxy(handle->proxy);
    return {};
  });
}
