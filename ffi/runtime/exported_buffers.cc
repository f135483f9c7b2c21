// Buffers of the plug-in as another framework's tensors.
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/runtime/buffer_views.h"
#include "ffi/runtime/device.h"
#include "ffi/runtime/shared_buffers.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu::pjrt {
namespace {

struct Exported {
  size_t count = 0;
  bool destroyed = false;  // by the client; the plug-in's buffer is kept until it is given back
};
std::mutex exports_mutex;             // of the tables below
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
std::deque<Returned>& ReturnedBuffers() {
  static auto* const list = new std::deque<Returned>;
  return *list;
}

thread_local bool noting = false;  // since xla_gpu_export_begin
thread_local std::vector<void*> noted;

void GiveBack(void* buffer) {
  CallBufferEntry(kBufferDecreaseExternalReferenceCount, buffer, nullptr);
  bool destroy = false;
  {
    std::lock_guard<std::mutex> lock(exports_mutex);
    const auto found = ExportedBuffers().find(buffer);
    if (found == ExportedBuffers().end() || --found->second.count > 0) return;
    destroy = found->second.destroyed;
    ExportedBuffers().erase(found);
    num_exported.fetch_sub(1, std::memory_order_release);
  }
  if (destroy) CallBufferEntry(kBufferDestroy, buffer, nullptr);
}

}  // namespace

void GiveBackReturned() {
  std::vector<void*> done;
  {
    std::lock_guard<std::mutex> lock(exports_mutex);
    auto& list = ReturnedBuffers();
    // In the order in which they came: on one stream, none is done before its predecessor.
    while (!list.empty() && TakeCompletedEvent(list.front().event)) {
      done.push_back(list.front().buffer);
      list.pop_front();
    }
  }
  for (void* buffer : done) GiveBack(buffer);
}

namespace {

constexpr int32_t kDlCuda = 2;  // DLPack's kDLCUDA

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
    const DeviceScope scope(managed->tensor.device_type == kDlCuda ? managed->tensor.device_id : -1);
    void* event = nullptr;
    if (Error error = RecordEvent(owned->stream, &event); !error.ok()) return error;  // the context is lost: keep it
    {
      std::lock_guard<std::mutex> lock(exports_mutex);
      ReturnedBuffers().push_back({owned->buffer, event});
    }
    GiveBackReturned();
    return {};
  });
}

Error ExportBuffer(void* buffer, void* stream, xla_gpu_export_args* args) {
  auto exported = std::make_unique<ExportedTensor>();
  exported->shape.assign(args->dims, args->dims + args->rank);
  exported->strides.resize(exported->shape.size());
  int64_t stride = 1;
  for (size_t i = exported->shape.size(); i-- > 0; stride *= exported->shape[i]) exported->strides[i] = stride;
  exported->buffer = buffer;
  exported->stream = stream;
  if (Error error = CallBufferEntry(kBufferIncreaseExternalReferenceCount, buffer, nullptr); !error.ok()) return error;
  {
    std::lock_guard<std::mutex> lock(exports_mutex);
    Exported& entry = ExportedBuffers()[buffer];
    if (++entry.count == 1) num_exported.fetch_add(1, std::memory_order_release);
  }
  void* data = nullptr;
  Error error = WaitForBuffer(stream, buffer);
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

Error ExportBuffers(xla_gpu_export_args* args, size_t count, void* stream) {
  noting = false;
  const std::vector<void*> buffers = std::exchange(noted, {});
  if (buffers.size() != count) {
    return Error::FailedPrecondition("xla_gpu_export_buffers: expected " + std::to_string(count) +
                                     " buffers whose unsafe pointers were read, got " + std::to_string(buffers.size()));
  }
  GiveBackReturned();
  for (size_t i = 0; i < count; ++i) {
    Error error = args[i].struct_size == sizeof *args
                      ? ExportBuffer(buffers[i], stream, &args[i])
                      : Error::InvalidArgument(
                            "xla_gpu_export_buffers: the caller and the library are of different "
                            "versions");
    if (error.ok()) continue;
    while (i-- > 0) DeleteExported(static_cast<ManagedTensor*>(args[i].managed_tensor));
    return error;
  }
  return {};
}

}  // namespace

void* SharedBufferUnsafePointer(void* untyped) {
  auto* args = static_cast<BufferArgs*>(untyped);
  if (!noting) return CallEntry(kBufferUnsafePointer, untyped);
  noted.push_back(args->buffer);
  args->out = nullptr;
  return nullptr;
}

bool KeepExported(void* buffer) {
  if (num_exported.load(std::memory_order_acquire) == 0) return false;
  std::lock_guard<std::mutex> lock(exports_mutex);
  const auto found = ExportedBuffers().find(buffer);
  if (found == ExportedBuffers().end()) return false;
  found->second.destroyed = true;
  return true;
}

}  // namespace xla_gpu::pjrt

extern "C" void xla_gpu_export_begin(void) {
  xla_gpu::pjrt::noting = true;
  xla_gpu::pjrt::noted.clear();
}

extern "C" const char* xla_gpu_export_buffers(xla_gpu_export_args* args, size_t count, void* stream) {
  return xla_gpu::Report(
      xla_gpu::Guarded("xla_gpu_export_buffers", [&] { return xla_gpu::pjrt::ExportBuffers(args, count, stream); }));
}

extern "C" size_t xla_gpu_export_count(void) {
  std::lock_guard<std::mutex> lock(xla_gpu::pjrt::exports_mutex);
  size_t count = 0;
  for (const auto& [buffer, exported] : xla_gpu::pjrt::ExportedBuffers()) count += exported.count;
  return count;
}
