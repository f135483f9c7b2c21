#include "ffi/runtime/shared_buffers.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/runtime/adapter_errors.h"
#include "ffi/runtime/buffer_views.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu::pjrt {
namespace {

// ---- The event of a transfer that was none ----

// torch_xla waits for the end of each transfer to let go of the host memory. A view copies nothing, so its transfer has
// ended; an event of the plug-in would cost a callback on the GPU's stream and a thread that is woken by it.
char has_happened;

bool HasHappened(const void* args) { return static_cast<const EventArgs*>(args)->event == &has_happened; }

// ---- Announced addresses ----

// What is announced together is ordered together: the first transfer makes a stream of the plug-in wait, and the views
// of all are ready on that stream.
struct Batch {
  void* stream;  // the other framework's
  std::mutex mutex;
  bool ordered = false;
  intptr_t ready_stream = 0;
};

struct Import {
  std::shared_ptr<Batch> batch;  // null: a placeholder
  int64_t id;
};

std::mutex imports_mutex;  // of the tables below
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
  std::lock_guard<std::mutex> lock(imports_mutex);
  const auto found = Announced().find(data);
  if (found == Announced().end()) return false;
  *import = std::move(found->second);
  Announced().erase(found);
  num_announced.store(Announced().size(), std::memory_order_release);
  return true;
}

void OnDelete(void*, void* id) {
  std::lock_guard<std::mutex> lock(imports_mutex);
  Released().push_back(static_cast<int64_t>(reinterpret_cast<intptr_t>(id)));
}

// Makes a stream of the plug-in wait for the other framework's, or waits here. Returns the stream to pass on, or 0.
Error Order(Batch* batch, void* device, intptr_t* ready) {
  std::lock_guard<std::mutex> lock(batch->mutex);
  if (!batch->ordered) {
    if (Error error = OrderViews(batch->stream, device, &batch->ready_stream); !error.ok()) return error;
    batch->ordered = true;
  }
  *ready = batch->ready_stream;
  return {};
}

Error ImportBuffer(const Import& import, BufferFromHostBufferArgs* args) {
  ViewShape shape(*args);
  void* device = args->device;
  if (device == nullptr) {
    std::lock_guard<std::mutex> lock(imports_mutex);
    const auto found = DevicesByMemory().find(args->memory);
    if (found != DevicesByMemory().end()) device = found->second;
  }
  const bool is_placeholder = import.batch == nullptr;
  if (is_placeholder && shape.layout != nullptr) {  // it lives no longer than this call
    return Error::Unimplemented("a placeholder with a device layout");
  }
  void* buffer = nullptr;
  intptr_t ready = 0;
  Error error;
  if (!is_placeholder) error = Order(import.batch.get(), device, &ready);
  if (error.ok()) {
    error = CreateView(shape, args->data, ready, is_placeholder ? nullptr : OnDelete,
                       is_placeholder ? nullptr : reinterpret_cast<void*>(static_cast<intptr_t>(import.id)), &buffer);
  }
  if (!error.ok()) return error;
  if (device == nullptr && CallBufferEntry(kBufferDevice, buffer, &device).ok()) {
    std::lock_guard<std::mutex> lock(imports_mutex);  // the first one of this memory waited; later ones need not
    DevicesByMemory()[args->memory] = device;
  }
  if (is_placeholder) AddPlaceholder(import.id, buffer, std::move(shape), device);
  args->buffer = buffer;
  args->done_with_host_buffer = &has_happened;
  return {};
}

// Announces addresses; `batch` is null for placeholders.
Error Announce(const void* const* data, const int64_t* ids, size_t count, const std::shared_ptr<Batch>& batch) {
  if (!HaveBufferViews()) {
    return Error::FailedPrecondition("no PJRT plug-in with views of device memory is in use");
  }
  GiveBackReturned();
  std::lock_guard<std::mutex> lock(imports_mutex);
  auto& announced = Announced();
  for (size_t i = 0; i < count; ++i) {
    if (data[i] != nullptr && announced.emplace(data[i], Import{batch, ids[i]}).second) continue;
    for (size_t earlier = 0; earlier < i; ++earlier) announced.erase(data[earlier]);
    return data[i] == nullptr ? Error::InvalidArgument("data is null")
                              : Error::FailedPrecondition("this memory is imported already, or by another thread");
  }
  num_announced.store(announced.size(), std::memory_order_release);
  return {};
}

}  // namespace

void* SharedBufferFromHostBuffer(void* untyped) {
  auto* args = static_cast<BufferFromHostBufferArgs*>(untyped);
  Import import;
  if (args->struct_size < sizeof *args || !TakeAnnounced(args->data, &import)) {
    return CallEntry(kClientBufferFromHostBuffer, untyped);
  }
  const Error error = Guarded("importing a buffer", [&] { return ImportBuffer(import, args); });
  return error.ok() ? nullptr : RefusedBy(error);
}

void* SharedBufferDestroy(void* untyped) {
  void* const buffer = static_cast<BufferArgs*>(untyped)->buffer;
  RemovePlaceholder(buffer);
  if (KeepExported(buffer)) return nullptr;
  return CallEntry(kBufferDestroy, untyped);
}

void* EventThatHasHappened() { return &has_happened; }

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
  using namespace xla_gpu::pjrt;
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_import_buffers", [&] {
    auto batch = std::make_shared<Batch>();
    batch->stream = stream;
    return Announce(data, ids, count, batch);
  }));
}

extern "C" const char* xla_gpu_import_placeholders(const void* const* data, const int64_t* ids, size_t count) {
  using namespace xla_gpu::pjrt;
  return xla_gpu::Report(
      xla_gpu::Guarded("xla_gpu_import_placeholders", [&] { return Announce(data, ids, count, nullptr); }));
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
  std::lock_guard<std::mutex> lock(xla_gpu::pjrt::imports_mutex);
  auto& released = xla_gpu::pjrt::Released();
  size_t count = 0;
  while (count < capacity && !released.empty()) {
    ids[count++] = released.back();
    released.pop_back();
  }
  return count;
}
