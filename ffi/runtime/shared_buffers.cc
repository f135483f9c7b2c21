#include "ffi/runtime/shared_buffers.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/runtime/device.h"
#include "ffi/runtime/error.h"
#include "ffi/runtime/pjrt_plugin.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu::pjrt {
namespace {

const Api* buffers_api = nullptr;  // set once, before an entry can be called
const StreamExtension* stream_extension = nullptr;

void* CallEntry(size_t entry, void* args) { return buffers_api->entries()[entry](args); }

// Calls an entry that takes a buffer. `out` may be null for one that returns nothing.
Error CallBufferEntry(size_t entry, void* buffer, void** out) {
  BufferArgs args = {out != nullptr ? sizeof args : kBufferArgsWithoutOut, nullptr, buffer, nullptr};
  Error error = TakeError(*buffers_api, CallEntry(entry, &args));
  if (error.ok() && out != nullptr) *out = args.out;
  return error;
}

// ---- The event of a transfer that was none ----

// torch_xla waits for the end of each transfer to let go of the host memory. A view copies nothing, so its transfer has
// ended; an event of the plug-in would cost a callback on the GPU's stream and a thread that is woken by it.
char has_happened;

bool HasHappened(const void* args) { return static_cast<const EventArgs*>(args)->event == &has_happened; }

// ---- In: announced addresses ----

// What is announced together is ordered together: the first transfer makes a stream of the plug-in wait, and the views
// of all are ready on that stream.
struct Batch {
  void* stream;  // the other framework's
  std::mutex mutex;
  bool ordered = false;
  intptr_t ready_stream = 0;
};

struct Import {
  std::shared_ptr<Batch> batch;
  int64_t id;
};

std::mutex tables_mutex;  // of the tables below
std::atomic<size_t> num_announced{0};
std::unordered_map<const void*, Import>& Announced() {
  static auto* const table = new std::unordered_map<const void*, Import>;  // threads of the plug-in may outlive main()
  return *table;
}
std::unordered_map<void*, void*>& DevicesByMemory() {
  static auto* const table = new std::unordered_map<void*, void*>;
  return *table;
}
std::vector<int64_t>& Released() {
  static auto* const ids = new std::vector<int64_t>;
  return *ids;
}

bool TakeAnnounced(const void* data, Import* import) {
  if (num_announced.load(std::memory_order_acquire) == 0) return false;
  std::lock_guard<std::mutex> lock(tables_mutex);
  const auto found = Announced().find(data);
  if (found == Announced().end()) return false;
  *import = std::move(found->second);
  Announced().erase(found);
  num_announced.store(Announced().size(), std::memory_order_release);
  return true;
}

void OnDelete(void*, void* id) {
  std::lock_guard<std::mutex> lock(tables_mutex);
  Released().push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(id)));
}

// The stream on which the plug-in waits for work of others, 0 where it does not tell.
intptr_t StreamOf(void* device) {
  if (device == nullptr || stream_extension == nullptr) return 0;
  StreamForReadyEventsArgs args = {sizeof args, device, 0};
  if (void* error = stream_extension->get_stream_for_external_ready_events(&args)) {
    TakeError(*buffers_api, error);
    return 0;
  }
  return args.stream;
}

// Makes a stream of the plug-in wait for the other framework's, or waits here. Returns the stream to pass on, or 0.
Error Order(Batch* batch, void* device, intptr_t* stream) {
  std::lock_guard<std::mutex> lock(batch->mutex);
  if (!batch->ordered) {
    batch->ready_stream = StreamOf(device);
    Error error = batch->ready_stream == 0 ? SynchronizeStream(batch->stream)
                                           : OrderStreams(batch->stream, reinterpret_cast<void*>(batch->ready_stream));
    if (!error.ok()) return error;
    batch->ordered = true;
  }
  *stream = batch->ready_stream;
  return {};
}

Error ImportBuffer(const Import& import, BufferFromHostBufferArgs* args) {
  void* device = args->device;
  if (device == nullptr) {
    std::lock_guard<std::mutex> lock(tables_mutex);
    const auto found = DevicesByMemory().find(args->memory);
    if (found != DevicesByMemory().end()) device = found->second;
  }
  CreateViewOfDeviceBufferArgs view = {};
  view.struct_size = sizeof view;
  if (Error error = Order(import.batch.get(), device, &view.stream); !error.ok()) return error;
  view.client = args->client;
  view.device_buffer_ptr = const_cast<void*>(args->data);
  view.dims = args->dims;
  view.num_dims = args->num_dims;
  view.element_type = args->type;
  view.layout = args->device_layout;
  view.device = args->device;
  view.memory = args->memory;
  view.on_delete_callback = OnDelete;
  view.on_delete_callback_arg = reinterpret_cast<void*>(static_cast<intptr_t>(import.id));
  Error error = TakeError(*buffers_api, CallEntry(kClientCreateViewOfDeviceBuffer, &view));
  if (!error.ok()) return error;
  if (device == nullptr && CallBufferEntry(kBufferDevice, view.buffer, &device).ok()) {
    std::lock_guard<std::mutex> lock(tables_mutex);  // the first one of this memory waited; later ones need not
    DevicesByMemory()[args->memory] = device;
  }
  args->buffer = view.buffer;
  args->done_with_host_buffer = &has_happened;
  return {};
}

// ---- Out: exported buffers ----

struct Exported {
  size_t count = 0;
  bool destroyed = false;  // by the client; the plug-in's buffer is kept until it is given back
};
std::atomic<size_t> num_exported{0};  // buffers
std::unordered_map<void*, Exported>& ExportedBuffers() {
  static auto* const table = new std::unordered_map<void*, Exported>;
  return *table;
}

// Given back by the other framework, whose stream may still use the memory until the event.
struct Returned {
  void* buffer;
  void* event;
};
std::vector<Returned>& ReturnedBuffers() {
  static auto* const list = new std::vector<Returned>;
  return *list;
}

thread_local bool noting = false;  // since xla_gpu_export_begin
thread_local void* noted = nullptr;

void GiveBack(void* buffer) {
  CallBufferEntry(kBufferDecreaseExternalReferenceCount, buffer, nullptr);
  bool destroy = false;
  {
    std::lock_guard<std::mutex> lock(tables_mutex);
    const auto found = ExportedBuffers().find(buffer);
    if (found == ExportedBuffers().end() || --found->second.count > 0) return;
    destroy = found->second.destroyed;
    ExportedBuffers().erase(found);
    num_exported.fetch_sub(1, std::memory_order_release);
  }
  if (destroy) CallBufferEntry(kBufferDestroy, buffer, nullptr);
}

// Gives back what the other framework is done with.
void GiveBackReturned() {
  std::vector<Returned> done;
  {
    std::lock_guard<std::mutex> lock(tables_mutex);
    auto& list = ReturnedBuffers();
    for (size_t i = 0; i < list.size();) {
      if (!TakeCompletedEvent(list[i].event)) {
        ++i;
        continue;
      }
      done.push_back(list[i]);
      list[i] = list.back();
      list.pop_back();
    }
  }
  for (const Returned& returned : done) GiveBack(returned.buffer);
}

// DLPack's DLManagedTensor.
struct ManagedTensor {
  struct {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t dtype_code, dtype_bits;
    uint16_t lanes;
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
  } tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor* self);
};

struct ExportedTensor {
  ManagedTensor managed;
  std::vector<int64_t> shape, strides;
  void* buffer;
  void* stream;
};

void DeleteExported(ManagedTensor* managed) {
  Guarded("giving back a buffer", [&]() -> Error {
    const std::unique_ptr<ExportedTensor> owned(static_cast<ExportedTensor*>(managed->manager_context));
    void* event = nullptr;
    if (Error error = RecordEvent(owned->stream, &event); !error.ok()) return error;  // the context is lost: keep it
    {
      std::lock_guard<std::mutex> lock(tables_mutex);
      ReturnedBuffers().push_back({owned->buffer, event});
    }
    GiveBackReturned();
    return {};
  });
}

Error ExportBuffer(xla_gpu_export_args* args) {
  noting = false;
  void* const buffer = std::exchange(noted, nullptr);
  if (args == nullptr || args->struct_size != sizeof *args) {
    return Error::InvalidArgument("xla_gpu_export_buffer: the caller and the library are of different versions");
  }
  if (buffer == nullptr) {
    return Error::FailedPrecondition(
        "xla_gpu_export_buffer: expected a buffer whose unsafe pointer was read, got none");
  }
  GiveBackReturned();
  auto exported = std::make_unique<ExportedTensor>();
  exported->shape.assign(args->dims, args->dims + args->rank);
  exported->strides.resize(exported->shape.size());
  int64_t stride = 1;
  for (size_t i = exported->shape.size(); i-- > 0; stride *= exported->shape[i]) exported->strides[i] = stride;
  exported->buffer = buffer;
  exported->stream = args->stream;
  if (Error error = CallBufferEntry(kBufferIncreaseExternalReferenceCount, buffer, nullptr); !error.ok()) return error;
  {
    std::lock_guard<std::mutex> lock(tables_mutex);
    Exported& entry = ExportedBuffers()[buffer];
    if (++entry.count == 1) num_exported.fetch_add(1, std::memory_order_release);
  }
  Error error;
  void* data = nullptr;
  if (stream_extension != nullptr) {
    WaitForBufferArgs wait = {sizeof wait, reinterpret_cast<intptr_t>(args->stream), buffer};
    error = TakeError(*buffers_api, stream_extension->wait_until_buffer_ready_on_stream(&wait));
  } else {
    error = Error::Unimplemented("the plug-in has no stream extension");
  }
  if (error.ok()) error = CallBufferEntry(kBufferOpaqueDeviceMemoryDataPointer, buffer, &data);
  if (!error.ok()) {
    GiveBack(buffer);
    return error;
  }
  ManagedTensor& managed = exported->managed;
  managed = {};
  managed.tensor = {data,
                    args->device_type,
                    args->device_id,
                    args->rank,
                    args->dtype_code,
                    args->dtype_bits,
                    /*lanes=*/1,
                    exported->shape.data(),
                    exported->strides.data(),
                    /*byte_offset=*/0};
  managed.manager_context = exported.get();
  managed.deleter = DeleteExported;
  args->managed_tensor = &exported.release()->managed;
  return {};
}

// An error of ours as one of the plug-in: there is no entry that makes one, so the plug-in gets a request that
// it must refuse. The text goes to the thread's last error, where Python looks first.
void* RefusedBy(const Error& error) {
  Report(error);
  BufferFromHostBufferArgs refused = {};
  refused.struct_size = 1;
  return CallEntry(kClientBufferFromHostBuffer, &refused);
}

}  // namespace

bool SharedBuffersUse(const Api& api) {
  for (size_t entry :
       {kEventDestroy, kEventIsReady, kEventError, kEventAwait, kEventOnReady, kClientBufferFromHostBuffer,
        kBufferDestroy, kBufferDevice, kBufferUnsafePointer, kBufferIncreaseExternalReferenceCount,
        kBufferDecreaseExternalReferenceCount, kBufferOpaqueDeviceMemoryDataPointer, kClientCreateViewOfDeviceBuffer}) {
    if (api.num_entries() <= entry || api.entries()[entry] == nullptr) return false;
  }
  buffers_api = &api;
  const auto* extension = reinterpret_cast<const StreamExtension*>(FindExtension(api, kStream));
  if (extension != nullptr && extension->base.struct_size >= sizeof *extension) stream_extension = extension;
  return true;
}

void* SharedBufferFromHostBuffer(void* untyped) {
  auto* args = static_cast<BufferFromHostBufferArgs*>(untyped);
  Import import;
  if (args->struct_size < sizeof *args || !TakeAnnounced(args->data, &import)) {
    return CallEntry(kClientBufferFromHostBuffer, untyped);
  }
  const Error error = Guarded("importing a buffer", [&] { return ImportBuffer(import, args); });
  return error.ok() ? nullptr : RefusedBy(error);
}

void* SharedBufferUnsafePointer(void* untyped) {
  auto* args = static_cast<BufferArgs*>(untyped);
  if (!noting) return CallEntry(kBufferUnsafePointer, untyped);
  noted = args->buffer;
  args->out = nullptr;
  return nullptr;
}

void* SharedBufferDestroy(void* untyped) {
  auto* args = static_cast<BufferArgs*>(untyped);
  if (num_exported.load(std::memory_order_acquire) != 0) {
    std::lock_guard<std::mutex> lock(tables_mutex);
    const auto found = ExportedBuffers().find(args->buffer);
    if (found != ExportedBuffers().end()) {
      found->second.destroyed = true;
      return nullptr;
    }
  }
  return CallEntry(kBufferDestroy, untyped);
}

void* SharedEventDestroy(void* args) { return HasHappened(args) ? nullptr : CallEntry(kEventDestroy, args); }

void* SharedEventIsReady(void* args) {
  if (!HasHappened(args)) return CallEntry(kEventIsReady, args);
  static_cast<EventIsReadyArgs*>(args)->is_ready = true;
  return nullptr;
}

void* SharedEventError(void* args) { return HasHappened(args) ? nullptr : CallEntry(kEventError, args); }

void* SharedEventAwait(void* args) { return HasHappened(args) ? nullptr : CallEntry(kEventAwait, args); }

void* SharedEventOnReady(void* args) {
  if (!HasHappened(args)) return CallEntry(kEventOnReady, args);
  const auto* on_ready = static_cast<const EventOnReadyArgs*>(args);
  on_ready->callback(nullptr, on_ready->user_arg);
  return nullptr;
}

}  // namespace xla_gpu::pjrt

extern "C" const char* xla_gpu_import_buffers(const void* const* data, const int64_t* ids, size_t count, void* stream) {
  using xla_gpu::Error;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_import_buffers", [&]() -> Error {
    if (xla_gpu::pjrt::buffers_api == nullptr) {
      return Error::FailedPrecondition("no PJRT plug-in with views of device memory is in use");
    }
    xla_gpu::pjrt::GiveBackReturned();
    auto batch = std::make_shared<xla_gpu::pjrt::Batch>();
    batch->stream = stream;
    std::lock_guard<std::mutex> lock(xla_gpu::pjrt::tables_mutex);
    auto& announced = xla_gpu::pjrt::Announced();
    for (size_t i = 0; i < count; ++i) {
      if (data[i] != nullptr && announced.emplace(data[i], xla_gpu::pjrt::Import{batch, ids[i]}).second) continue;
      for (size_t earlier = 0; earlier < i; ++earlier) announced.erase(data[earlier]);
      return data[i] == nullptr ? Error::InvalidArgument("data is null")
                                : Error::FailedPrecondition("this memory is imported already, or by another thread");
    }
    xla_gpu::pjrt::num_announced.store(announced.size(), std::memory_order_release);
    return {};
  }));
}

extern "C" size_t xla_gpu_import_cancel(const void* const* data, size_t count, int64_t* ids) {
  size_t taken = 0;
  xla_gpu::pjrt::Import import;
  for (size_t i = 0; i < count; ++i) {
    if (xla_gpu::pjrt::TakeAnnounced(data[i], &import)) ids[taken++] = import.id;
  }
  return taken;
}

extern "C" size_t xla_gpu_import_released(int64_t* ids, size_t capacity) {
  std::lock_guard<std::mutex> lock(xla_gpu::pjrt::tables_mutex);
  auto& released = xla_gpu::pjrt::Released();
  size_t count = 0;
  while (count < capacity && !released.empty()) {
    ids[count++] = released.back();
    released.pop_back();
  }
  return count;
}

extern "C" void xla_gpu_export_begin(void) {
  xla_gpu::pjrt::noting = true;
  xla_gpu::pjrt::noted = nullptr;
}

extern "C" const char* xla_gpu_export_buffer(xla_gpu_export_args* args) {
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_export_buffer", [&] { return xla_gpu::pjrt::ExportBuffer(args); }));
}

extern "C" size_t xla_gpu_export_count(void) {
  std::lock_guard<std::mutex> lock(xla_gpu::pjrt::tables_mutex);
  size_t count = 0;
  for (const auto& [buffer, exported] : xla_gpu::pjrt::ExportedBuffers()) count += exported.count;
  return count;
}
