// What sharing buffers with another framework calls of the plug-in.
#ifndef XLA_GPU_RUNTIME_BUFFER_VIEWS_H_
#define XLA_GPU_RUNTIME_BUFFER_VIEWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/runtime/error.h"
#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// Keeps the plug-in's table, before any function below is called; false where it lacks what they need.
bool BufferViewsUse(const Api& api);
bool HaveBufferViews();

void* CallEntry(size_t entry, void* args);

// Calls an entry that takes a buffer. `out` may be null for one that returns nothing.
Error CallBufferEntry(size_t entry, void* buffer, void** out);

// The plug-in's stream on which views become ready, 0 where it names none.
intptr_t ReadyStream(void* device);

// Makes views that are created from now on ready after what `stream`, the other framework's, holds now: `ready` is the
// stream to create them with. Waits here where the plug-in has no such stream.
Error OrderViews(void* stream, void* device, intptr_t* ready);

// Makes `stream`, the other framework's, wait for a buffer.
Error WaitForBuffer(void* stream, void* buffer);

// What a view is, but for its address: as the client requested a buffer.
struct ViewShape {
  void* client;
  int32_t type;
  std::vector<int64_t> dims;
  void* layout;
  void* device;
  void* memory;

  explicit ViewShape(const BufferFromHostBufferArgs& args);
};

using DeleteFunction = void (*)(void* data, void* argument);
Error CreateView(const ViewShape& shape, const void* data, intptr_t ready_stream, DeleteFunction on_delete,
                 void* argument, void** buffer);

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_BUFFER_VIEWS_H_
