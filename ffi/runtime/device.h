// Memory and the current device, on the host and on CUDA.
#ifndef XLA_GPU_RUNTIME_DEVICE_H_
#define XLA_GPU_RUNTIME_DEVICE_H_

#include <cstddef>
#include <cstdint>

#include "ffi/runtime/error.h"

namespace xla_gpu {

// Makes a CUDA device the thread's current one as long as the scope lives; -1 (the host) does nothing. Makes no context
// on any other device, such as the one that a new thread begins with.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device_ordinal);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  const Error& error() const { return error_; }

 private:
  Error error_;
  int pushed_ = -1;  // the device whose context is on top of the thread's stack; -1: nothing to undo
};

// Gives the thread back the CUDA device that was its current one, whatever happens in between; not one that this
// process does not use, such as device 0 in all processes of torchrun but the first. On the host nothing.
class CurrentDeviceKept {
 public:
  CurrentDeviceKept();
  ~CurrentDeviceKept();
  CurrentDeviceKept(const CurrentDeviceKept&) = delete;
  CurrentDeviceKept& operator=(const CurrentDeviceKept&) = delete;

 private:
  int current_ = -1;  // -1: unknown, there is no GPU
};

// `size` bytes at a multiple of `alignment` (a power of two), on the host (`device_ordinal` -1) or on the current CUDA
// device in the order of `stream`. Null for size 0.
Error AllocateMemory(int32_t device_ordinal, void* stream, size_t size, size_t alignment, void** data);
Error FreeMemory(int32_t device_ordinal, void* stream, void* data);

// Work that is queued on stream `then` from now on starts after what stream `first` holds now. On the host nothing.
Error OrderStreams(void* first, void* then);

// Waits for what the stream holds.
Error SynchronizeStream(void* stream);

// An event that completes when what `stream` holds now is done. Null on the host.
Error RecordEvent(void* stream, void** event);

// Whether the event is complete; it is destroyed then.
bool TakeCompletedEvent(void* event);

}  // namespace xla_gpu

#endif  // XLA_GPU_RUNTIME_DEVICE_H_
