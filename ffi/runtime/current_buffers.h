// Buffers of the client that may have another one of the plug-in behind them: proxy_programs.h says when.
#ifndef XLA_GPU_RUNTIME_CURRENT_BUFFERS_H_
#define XLA_GPU_RUNTIME_CURRENT_BUFFERS_H_

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

// A buffer of the plug-in behind one of the client's, destroyed when nothing uses it any more: without the lock below,
// since the plug-in's entry may take long.
class CurrentBuffer {
 public:
  explicit CurrentBuffer(void* buffer) : buffer_(buffer) {}
  ~CurrentBuffer();
  CurrentBuffer(const CurrentBuffer&) = delete;
  CurrentBuffer& operator=(const CurrentBuffer&) = delete;
  void* buffer() const { return buffer_; }

 private:
  void* const buffer_;
};
using KeptBuffers = std::vector<std::shared_ptr<CurrentBuffer>>;

// Which buffers of the client may have one behind them, by the client's. All of it with the lock.
class CurrentBuffers {
 public:
  std::unique_lock<std::mutex> Lock() { return std::unique_lock<std::mutex>(mutex_); }

  // From now on this buffer may have one behind it.
  void Add(void* buffer) { buffers_.emplace(buffer, nullptr); }
  bool Has(void* buffer) const { return buffers_.find(buffer) != buffers_.end(); }
  // What is behind a buffer; null: nothing else.
  std::shared_ptr<CurrentBuffer> Behind(void* buffer) const;
  // The plug-in's buffer, which `kept` keeps.
  void* Of(void* buffer, KeptBuffers* kept) const;
  // Puts another one behind a buffer; `kept` gets what was there.
  void Update(void* buffer, void* current, KeptBuffers* kept);
  // The client destroys the buffer.
  std::shared_ptr<CurrentBuffer> Remove(void* buffer);

 private:
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<CurrentBuffer>> buffers_;  // null: nothing else behind it
};
CurrentBuffers& TheCurrentBuffers();

// Puts entries in front of those of the adapter's table that take a buffer. Until UseCurrentBuffers they only call
// them.
void WrapBufferEntries(Entry* entries);
bool HaveCurrentBuffers();  // whether that has happened
void UseCurrentBuffers();
bool CurrentBuffersInUse();

// From now on the buffers whose unsafe pointers this thread asks for are noted, and have none.
void NoteBuffers();
std::vector<void*> TakeNotedBuffers();  // ends that

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_CURRENT_BUFFERS_H_
