#include "ffi/runtime/direct_launch.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/runtime/error.h"
#include "ffi/runtime/pjrt_abi_executables.h"
#include "ffi/runtime/pjrt_plugin.h"
#include "ffi/runtime/xla_gpu.h"

using xla_gpu::Error;

// An array on each device of the client: a buffer for each. The queue's thread makes and destroys them.
struct xla_gpu_array {
  std::vector<void*> buffers = {};
  bool owned = true;     // else they are another's, who keeps them
  Error error = {};      // why there are none
  uint64_t made_by = 0;  // the number of the job that makes what it holds; 0: there from the beginning. The caller's
};

// An execution that was recorded.
struct xla_gpu_launch {
  void* executable;
  void* execute_device;                       // of a program that has several devices, which one runs it; or null: all
  std::vector<void*> devices;                 // PJRT_Device
  std::vector<std::vector<void*>> arguments;  // [devices][arguments]
  std::vector<std::vector<void*>> results;    // [devices][results]
};

namespace xla_gpu::pjrt {
namespace {

const Api* api = nullptr;  // set once, before an entry can be called
std::atomic<void*> the_client{nullptr};

std::mutex record_mutex;  // of what follows
std::atomic<int> results_to_record{-1};
std::unique_ptr<xla_gpu_launch> recorded;

template <typename Args>
Error Call(size_t entry, Args* args) {
  if (api == nullptr || api->num_entries() <= entry || api->entries()[entry] == nullptr) {
    return Error::Unimplemented("the PJRT plug-in lacks entry " + std::to_string(entry));
  }
  args->struct_size = sizeof *args;
  return TakeError(*api, api->entries()[entry](args));
}

Error DestroyBuffer(void* buffer) {
  BufferArgs args = {kBufferArgsWithoutOut, nullptr, buffer, nullptr};
  return TakeError(*api, api->entries()[kBufferDestroy](&args));
}

void Release(xla_gpu_array* array) {
  if (array->owned) {
    for (void* buffer : array->buffers) DestroyBuffer(buffer);
  }
  array->buffers.clear();
}

// Waits for an event, which is the caller's, and destroys it; null has happened.
Error Await(void* event) {
  if (event == nullptr) return {};
  EventArgs await = {};
  await.event = event;
  Error error = Call(kEventAwait, &await);
  EventArgs destroy = {};
  destroy.event = event;
  Error destroyed = Call(kEventDestroy, &destroy);
  return error.ok() ? destroyed : error;
}

// Whether a loaded executable has so many results; yes where the plug-in does not say.
bool HasResults(void* loaded, size_t num_results) {
  LoadedExecutableGetExecutableArgs get = {};
  get.loaded_executable = loaded;
  if (!Call(kLoadedExecutableGetExecutable, &get).ok()) return true;
  ExecutableNumOutputsArgs outputs = {};
  outputs.executable = get.executable;
  const bool known = Call(kExecutableNumOutputs, &outputs).ok();
  ExecutableDestroyArgs destroy = {};
  destroy.executable = get.executable;
  Call(kExecutableDestroy, &destroy);
  return !known || outputs.num_outputs == num_results;
}

Error Record(const LoadedExecutableExecuteArgs& args, size_t num_results) {
  auto launch = std::make_unique<xla_gpu_launch>();
  launch->executable = args.executable;
  launch->execute_device = args.execute_device;
  for (size_t device = 0; device < args.num_devices; ++device) {
    void* const* arguments = args.argument_lists[device];
    launch->arguments.emplace_back(arguments, arguments + args.num_args);
    void* const* results = args.output_lists[device];
    launch->results.emplace_back(results, results + num_results);
    BufferArgs of = {};
    of.buffer = args.num_args > 0 ? arguments[0] : results[0];
    if (Error error = Call(kBufferDevice, &of); !error.ok()) return error;
    launch->devices.push_back(of.out);
  }
  std::lock_guard<std::mutex> lock(record_mutex);
  recorded = std::move(launch);
  return {};
}

// What the arrays' owner wants done, in that order, by a thread: an execution takes it up to a millisecond, in which
// the owner prepares the next one.
class Queue {
 public:
  // Returns the number of the job.
  uint64_t Add(std::function<void()> job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      std::thread([this] { Work(); }).detach();  // the queue is never destroyed, and Wait() empties it before the end
      started_ = true;
    }
    jobs_.push_back(std::move(job));
    added_.notify_one();
    return ++num_added_;
  }

  // Waits until a job is done; 0: all that there are.
  void Wait(uint64_t job) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (job == 0) job = num_added_;
    done_.wait(lock, [&] { return num_done_ >= job; });
  }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      added_.wait(lock, [&] { return !jobs_.empty(); });
      {
        const std::function<void()> job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        job();
      }
      lock.lock();
      ++num_done_;
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_, done_;
  std::deque<std::function<void()>> jobs_;
  uint64_t num_added_ = 0, num_done_ = 0;
  bool started_ = false;
};

Queue& TheQueue() {
  static auto* const queue = new Queue;
  return *queue;
}

Error Run(const xla_gpu_launch& launch, const std::vector<int32_t>& places, const std::vector<xla_gpu_array*>& inputs,
          size_t num_state, const std::vector<xla_gpu_array*>& outputs) {
  const size_t num_devices = launch.devices.size();
  const size_t num_results = launch.results[0].size();
  const size_t num_inputs = inputs.size(), num_outputs = outputs.size();
  std::vector<std::vector<void*>> arguments = launch.arguments;
  for (size_t i = 0; i < num_inputs; ++i) {
    if (!inputs[i]->error.ok()) return inputs[i]->error;
    if (places[i] < 0) continue;  // the program does not read it
    if (inputs[i]->buffers.size() != num_devices) {
      return Error::InvalidArgument("xla_gpu_launch_run: input " + std::to_string(i) + " has " +
                                    std::to_string(inputs[i]->buffers.size()) + " buffers, the program is for " +
                                    std::to_string(num_devices) + (num_devices == 1 ? " device" : " devices"));
    }
    for (size_t device = 0; device < num_devices; ++device) {
      arguments[device][static_cast<size_t>(places[i])] = inputs[i]->buffers[device];
    }
  }
  std::vector<std::vector<void*>> results(num_devices, std::vector<void*>(num_results));
  std::vector<void* const*> argument_lists(num_devices);
  std::vector<void**> output_lists(num_devices);
  for (size_t device = 0; device < num_devices; ++device) {
    argument_lists[device] = arguments[device].data();
    output_lists[device] = results[device].data();
  }
  struct {
    Args options;  // PJRT_ExecuteOptions, and more than any later version has: all of it as it is by default
    uint64_t room[64];
  } options = {};
  options.options.struct_size = sizeof options;
  LoadedExecutableExecuteArgs args = {};
  args.struct_size = sizeof args;
  args.executable = launch.executable;
  args.options = &options.options;
  args.argument_lists = argument_lists.data();
  args.num_devices = num_devices;
  args.num_args = launch.arguments[0].size();
  args.output_lists = output_lists.data();
  args.execute_device = launch.execute_device;
  if (Error error = TakeError(*api, api->entries()[kLoadedExecutableExecute](&args)); !error.ok()) return error;
  const auto take = [&](size_t result) {
    std::vector<void*> buffers(num_devices);
    for (size_t device = 0; device < num_devices; ++device) buffers[device] = results[device][result];
    return buffers;
  };
  for (size_t i = 0; i < num_state; ++i) {
    xla_gpu_array* const state = inputs[num_inputs - num_state + i];
    Release(state);
    state->buffers = take(num_outputs + i);
    state->owned = true;
  }
  for (size_t i = 0; i < num_outputs; ++i) outputs[i]->buffers = take(i);
  return {};
}

// What a transfer copies, kept until its thread does.
struct HostArray {
  std::vector<char> bytes;
  int32_t type;
  std::vector<int64_t> dims;
};

Error FromHost(const xla_gpu_launch& launch, const HostArray& host, xla_gpu_array* array) {
  for (void* device : launch.devices) {
    BufferFromHostBufferArgs args = {};
    args.client = the_client;
    args.data = host.bytes.data();
    args.type = host.type;
    args.dims = host.dims.data();
    args.num_dims = host.dims.size();
    args.host_buffer_semantics = 0;  // kImmutableOnlyDuringCall
    args.device = device;
    if (Error error = Call(kClientBufferFromHostBuffer, &args); !error.ok()) return error;
    array->buffers.push_back(args.buffer);
    if (args.done_with_host_buffer != nullptr) {
      EventArgs destroy = {};
      destroy.event = args.done_with_host_buffer;
      Call(kEventDestroy, &destroy);
    }
  }
  return {};
}

}  // namespace

void DirectLaunchUse(const Api& table) { api = &table; }
void DirectLaunchUseClient(void* client) { the_client = client; }
void* TheClient() { return the_client; }

void* ExecuteRecorded(LoadedExecutableExecuteArgs* args) {
  void* const error = api->entries()[kLoadedExecutableExecute](args);
  int results = results_to_record.load(std::memory_order_relaxed);
  if (results < 0 || error != nullptr) return error;
  Guarded("recording an execution", [&]() -> Error {
    const auto num_results = static_cast<size_t>(results);
    // Another thread's program may come first.
    if (!HasResults(args->executable, num_results)) return {};
    if (!results_to_record.compare_exchange_strong(results, -1)) return {};
    return Record(*args, num_results);
  });
  return error;
}

}  // namespace xla_gpu::pjrt

using namespace xla_gpu::pjrt;
using xla_gpu::Guarded;
using xla_gpu::Report;

extern "C" void xla_gpu_launch_record(int32_t num_results) {
  std::lock_guard<std::mutex> lock(record_mutex);
  recorded.reset();
  results_to_record = num_results;
}

extern "C" xla_gpu_launch* xla_gpu_launch_take_recorded(size_t* num_arguments) {
  std::lock_guard<std::mutex> lock(record_mutex);
  results_to_record = -1;
  if (recorded != nullptr) *num_arguments = recorded->arguments[0].size();
  return recorded.release();
}

extern "C" void xla_gpu_launch_destroy(xla_gpu_launch* launch) {
  Guarded("xla_gpu_launch_destroy", [&]() -> Error {
    TheQueue().Add([launch] { delete launch; });
    return {};
  });
}

extern "C" xla_gpu_array* xla_gpu_launch_buffers(const xla_gpu_launch* launch, int32_t of_results, size_t index) {
  const auto& lists = of_results != 0 ? launch->results : launch->arguments;
  auto* const array = new xla_gpu_array;
  array->owned = false;
  for (const std::vector<void*>& list : lists) array->buffers.push_back(list[index]);
  return array;
}

extern "C" const char* xla_gpu_launch_run(const xla_gpu_launch* launch, const int32_t* places,
                                          xla_gpu_array* const* inputs, size_t num_inputs, size_t num_state,
                                          xla_gpu_array** outputs) {
  return Report(Guarded("xla_gpu_launch_run", [&]() -> Error {
    std::vector<xla_gpu_array*> made(launch->results[0].size() - num_state);
    for (size_t i = 0; i < made.size(); ++i) made[i] = outputs[i] = new xla_gpu_array;
    std::vector<xla_gpu_array*> given(inputs, inputs + num_inputs);
    const uint64_t job =
        TheQueue().Add([launch, made, given, num_state, at = std::vector<int32_t>(places, places + num_inputs)] {
          Error error = Guarded("xla_gpu_launch_run", [&] { return Run(*launch, at, given, num_state, made); });
          if (error.ok()) return;
          for (xla_gpu_array* output : made) output->error = error;
          for (size_t i = given.size() - num_state; i < given.size(); ++i) given[i]->error = error;
        });
    for (xla_gpu_array* output : made) output->made_by = job;
    for (size_t i = num_inputs - num_state; i < num_inputs; ++i) inputs[i]->made_by = job;
    return {};
  }));
}

extern "C" const char* xla_gpu_array_make(const xla_gpu_launch* launch, const void* data, size_t size, int32_t type,
                                          const int64_t* dims, size_t num_dims, xla_gpu_array** array) {
  return Report(Guarded("xla_gpu_array_make", [&]() -> Error {
    const char* bytes = static_cast<const char*>(data);
    auto host = std::make_shared<HostArray>(HostArray{{bytes, bytes + size}, type, {dims, dims + num_dims}});
    auto* const made = new xla_gpu_array;
    *array = made;
    made->made_by = TheQueue().Add([launch, host, made] {
      made->error = Guarded("xla_gpu_array_make", [&] { return FromHost(*launch, *host, made); });
    });
    return {};
  }));
}

extern "C" const char* xla_gpu_array_read(const xla_gpu_array* array, void* data, size_t size) {
  return Report(Guarded("xla_gpu_array_read", [&]() -> Error {
    if (array->made_by != 0) TheQueue().Wait(array->made_by);
    if (!array->error.ok()) return array->error;
    BufferToHostBufferArgs args = {};
    args.buffer = array->buffers.at(0);
    args.data = data;
    args.size = size;
    if (Error error = Call(kBufferToHostBuffer, &args); !error.ok()) return error;
    return Await(args.event);
  }));
}

extern "C" void xla_gpu_array_destroy(xla_gpu_array* array) {
  Guarded("xla_gpu_array_destroy", [&]() -> Error {
    TheQueue().Add([array] {
      Release(array);
      delete array;
    });
    return {};
  });
}

extern "C" void xla_gpu_launch_wait() { TheQueue().Wait(0); }
