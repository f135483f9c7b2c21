#include "ffi/runtime/failed_executions.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/runtime/adapter_errors.h"
#include "ffi/runtime/buffer_views.h"
#include "ffi/runtime/direct_launch.h"
#include "ffi/runtime/error.h"
#include "ffi/runtime/executable_results.h"
#include "ffi/runtime/pjrt_abi_executables.h"
#include "ffi/runtime/pjrt_plugin.h"
#include "ffi/runtime/shared_buffers.h"

namespace xla_gpu::pjrt {
namespace {

const Api* failing_plugin = nullptr;  // set once, before an entry can be called; null: it makes no buffers with errors

// Entries that take a buffer's memory. The plug-in's buffer with an error has none, and may not look.
constexpr size_t kOfMemory[] = {kBufferOnDeviceSizeInBytes,
                                kBufferCopyToDevice,
                                kBufferToHostBuffer,
                                kBufferUnsafePointer,
                                kBufferIncreaseExternalReferenceCount,
                                kBufferDecreaseExternalReferenceCount,
                                kBufferOpaqueDeviceMemoryDataPointer,
                                kBufferCopyToMemory,
                                kBufferCopyRawToHost,
                                kBufferCopyRawToHostFuture,
                                kBufferDonateWithControlDependency,
                                kBufferBitcast};
std::array<Entry, std::size(kOfMemory)> of_memory = {};
Entry destroy_buffer = nullptr;

std::atomic<size_t> num_failed{0};
std::mutex failed_mutex;
std::unordered_map<void*, std::shared_ptr<const Error>>& Failed() {
  static auto* const failed = new std::unordered_map<void*, std::shared_ptr<const Error>>;
  return *failed;
}

std::shared_ptr<const Error> ErrorOf(void* buffer) {
  if (num_failed.load(std::memory_order_acquire) == 0) return nullptr;
  std::lock_guard<std::mutex> lock(failed_mutex);
  const auto found = Failed().find(buffer);
  return found == Failed().end() ? nullptr : found->second;
}

template <size_t kIndex>
void* CallUnlessFailed(void* args) {
  const std::shared_ptr<const Error> error = ErrorOf(static_cast<BufferArgs*>(args)->buffer);
  return error == nullptr ? of_memory[kIndex](args) : RefusedBy(*error);
}

void* DestroyFailed(void* args) {
  if (num_failed.load(std::memory_order_acquire) != 0) {
    std::lock_guard<std::mutex> lock(failed_mutex);
    Failed().erase(static_cast<BufferArgs*>(args)->buffer);
    num_failed.store(Failed().size(), std::memory_order_release);
  }
  return destroy_buffer(args);
}

template <size_t... kIndices>
void WrapEntriesOfMemory(Entry* entries, size_t num_entries, std::index_sequence<kIndices...>) {
  const auto wrap = [&](size_t index, Entry front) {
    const size_t entry = kOfMemory[index];
    if (entry >= num_entries || entries[entry] == nullptr) return;
    of_memory[index] = std::exchange(entries[entry], front);
  };
  (wrap(kIndices, CallUnlessFailed<kIndices>), ...);
}

template <typename Args>
Error CallPlugin(size_t entry, Args* args) {
  args->struct_size = sizeof *args;
  return TakeError(*failing_plugin, failing_plugin->entries()[entry](args));
}

Error DevicesOf(const LoadedExecutableExecuteArgs& args, std::vector<void*>* devices) {
  if (args.execute_device != nullptr) {
    devices->assign(args.num_devices, args.execute_device);
    return {};
  }
  LoadedExecutableAddressableDevicesArgs addressable = {};
  addressable.executable = args.executable;
  if (Error error = CallPlugin(kLoadedExecutableAddressableDevices, &addressable); !error.ok()) return error;
  if (addressable.num_devices < args.num_devices) return Error::Internal("fewer devices than the execution has");
  devices->assign(addressable.devices, addressable.devices + args.num_devices);
  return {};
}

Error MakeBuffer(const Error& of, const ResultForm& form, void* device, void** buffer) {
  BufferArgs memory = {};  // of a device, in the same form
  memory.buffer = device;
  if (Error error = CallPlugin(kDeviceDefaultMemory, &memory); !error.ok()) return error;
  CreateErrorBufferArgs create = {};
  create.client = TheClient();
  create.error_code = static_cast<int32_t>(of.code);
  create.error_message = of.message.data();
  create.error_message_size = of.message.size();
  create.dims = form.dims.data();
  create.num_dims = form.dims.size();
  create.type = form.type;
  create.memory = memory.out;
  if (Error error = CallPlugin(kClientCreateErrorBuffer, &create); !error.ok()) return error;
  *buffer = create.buffer;
  return {};
}

// Of all devices, one after the other.
class MadeBuffers {
 public:
  ~MadeBuffers() {
    for (void* buffer : buffers_) {
      BufferArgs args = {kBufferArgsWithoutOut, nullptr, buffer, nullptr};
      if (void* error = DestroyFailed(&args)) TakeAnyError(error);
    }
  }

  Error Make(const Error& of, const std::vector<ResultForm>& forms, const std::vector<void*>& devices) {
    buffers_.reserve(forms.size() * devices.size());
    for (void* device : devices) {
      for (const ResultForm& form : forms) {
        void* buffer = nullptr;
        if (Error error = MakeBuffer(of, form, device, &buffer); !error.ok()) return error;
        buffers_.push_back(buffer);
      }
    }
    return {};
  }

  void HandOut(const std::shared_ptr<const Error>& error, const LoadedExecutableExecuteArgs& args) {
    std::lock_guard<std::mutex> lock(failed_mutex);
    // First, since it is what the destructor looks at: where there is no memory for all, none stays in the table.
    num_failed.store(Failed().size() + buffers_.size(), std::memory_order_release);
    for (void* buffer : buffers_) Failed()[buffer] = error;
    num_failed.store(Failed().size(), std::memory_order_release);
    const size_t num_results = buffers_.size() / args.num_devices;
    for (size_t i = 0; i < buffers_.size(); ++i) args.output_lists[i / num_results][i % num_results] = buffers_[i];
    buffers_.clear();
  }

 private:
  std::vector<void*> buffers_;
};

constexpr char kFailedBefore[] = "the execution that was to compute this has failed: ";

}  // namespace

void FailedExecutionsUse(const Api& api, Entry* entries, size_t num_entries) {
  for (size_t entry :
       {kDeviceDefaultMemory, kExecutableDestroy, kLoadedExecutableGetExecutable, kLoadedExecutableAddressableDevices,
        kBufferDestroy, kExecutableOutputElementTypes, kExecutableOutputDimensions, kClientCreateErrorBuffer}) {
    if (num_entries <= entry || entries[entry] == nullptr) return;
  }
  failing_plugin = &api;
  WrapEntriesOfMemory(entries, num_entries, std::make_index_sequence<std::size(kOfMemory)>());
  destroy_buffer = std::exchange(entries[kBufferDestroy], DestroyFailed);
}

void* ErrorOfArguments(const LoadedExecutableExecuteArgs& args) {
  if (num_failed.load(std::memory_order_acquire) == 0) return nullptr;
  for (size_t device = 0; device < args.num_devices; ++device) {
    for (size_t i = 0; i < args.num_args; ++i) {
      if (const auto error = ErrorOf(args.argument_lists[device][i])) return RefusedBy(*error);
    }
  }
  return nullptr;
}

void* ReturnFailed(LoadedExecutableExecuteArgs* args, void* error) {
  if (failing_plugin == nullptr || args->num_devices == 0) return error;
  const Error reason = TakeAnyError(error);
  const Error made = Guarded("results of an execution that failed", [&]() -> Error {
    std::vector<ResultForm> forms;
    if (Error failed = FormsOfResults(*failing_plugin, args->executable, &forms); !failed.ok()) return failed;
    if (forms.empty()) return Error::Internal("no results that could have the error");
    std::vector<void*> devices;
    if (Error failed = DevicesOf(*args, &devices); !failed.ok()) return failed;
    Error told = reason;
    if (told.message.find(kFailedBefore) == std::string::npos) told.message.insert(0, kFailedBefore);
    MadeBuffers buffers;
    if (Error failed = buffers.Make(told, forms, devices); !failed.ok()) return failed;
    buffers.HandOut(std::make_shared<const Error>(std::move(told)), *args);
    return {};
  });
  if (!made.ok()) return RefusedBy(reason);
  if (args->device_complete_events != nullptr) {
    std::fill_n(args->device_complete_events, args->num_devices, EventThatHasHappened());
  }
  return nullptr;
}

}  // namespace xla_gpu::pjrt
