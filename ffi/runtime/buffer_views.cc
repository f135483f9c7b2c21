#include "ffi/runtime/buffer_views.h"

#include "ffi/runtime/device.h"
#include "ffi/runtime/pjrt_plugin.h"

namespace xla_gpu::pjrt {
namespace {

const Api* buffers_api = nullptr;  // set once, before an entry can be called
const StreamExtension* stream_extension = nullptr;

}  // namespace

bool BufferViewsUse(const Api& api) {
  for (size_t entry :
       {kEventDestroy, kEventIsReady, kEventError, kEventAwait, kEventOnReady, kClientBufferFromHostBuffer,
        kLoadedExecutableExecute, kBufferDestroy, kBufferDevice, kBufferUnsafePointer,
        kBufferIncreaseExternalReferenceCount, kBufferDecreaseExternalReferenceCount,
        kBufferOpaqueDeviceMemoryDataPointer, kClientCreateViewOfDeviceBuffer}) {
    if (api.num_entries() <= entry || api.entries()[entry] == nullptr) return false;
  }
  buffers_api = &api;
  const auto* extension = reinterpret_cast<const StreamExtension*>(FindExtension(api, kStream));
  if (extension != nullptr && extension->base.struct_size >= sizeof *extension) stream_extension = extension;
  return true;
}

bool HaveBufferViews() { return buffers_api != nullptr; }

void* CallEntry(size_t entry, void* args) { return buffers_api->entries()[entry](args); }

Error CallBufferEntry(size_t entry, void* buffer, void** out) {
  BufferArgs args = {out != nullptr ? sizeof args : kBufferArgsWithoutOut, nullptr, buffer, nullptr};
  Error error = TakeError(*buffers_api, CallEntry(entry, &args));
  if (error.ok() && out != nullptr) *out = args.out;
  return error;
}

intptr_t ReadyStream(void* device) {
  if (device == nullptr || stream_extension == nullptr) return 0;
  StreamForReadyEventsArgs args = {sizeof args, device, 0};
  if (void* error = stream_extension->get_stream_for_external_ready_events(&args)) {
    TakeError(*buffers_api, error);
    return 0;
  }
  return args.stream;
}

Error OrderViews(void* stream, void* device, intptr_t* ready) {
  *ready = ReadyStream(device);
  return *ready == 0 ? SynchronizeStream(stream) : OrderStreams(stream, reinterpret_cast<void*>(*ready));
}

Error WaitForBuffer(void* stream, void* buffer) {
  if (stream_extension == nullptr) return Error::Unimplemented("the plug-in has no stream extension");
  WaitForBufferArgs wait = {sizeof wait, reinterpret_cast<intptr_t>(stream), buffer};
  return TakeError(*buffers_api, stream_extension->wait_until_buffer_ready_on_stream(&wait));
}

ViewShape::ViewShape(const BufferFromHostBufferArgs& args)
    : client(args.client),
      type(args.type),
      dims(args.dims, args.dims + args.num_dims),
      layout(args.device_layout),
      device(args.device),
      memory(args.memory) {}

Error CreateView(const ViewShape& shape, const void* data, intptr_t ready_stream, DeleteFunction on_delete,
                 void* argument, void** buffer) {
  CreateViewOfDeviceBufferArgs view = {};
  view.struct_size = sizeof view;
  view.client = shape.client;
  view.device_buffer_ptr = const_cast<void*>(data);
  view.dims = shape.dims.data();
  view.num_dims = shape.dims.size();
  view.element_type = shape.type;
  view.layout = shape.layout;
  view.device = shape.device;
  view.memory = shape.memory;
  view.stream = ready_stream;
  view.on_delete_callback = on_delete != nullptr ? on_delete : [](void*, void*) {};  // called without a null check
  view.on_delete_callback_arg = argument;
  Error error = TakeError(*buffers_api, CallEntry(kClientCreateViewOfDeviceBuffer, &view));
  if (error.ok()) *buffer = view.buffer;
  return error;
}

}  // namespace xla_gpu::pjrt
