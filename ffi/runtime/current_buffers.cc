#include "ffi/runtime/current_buffers.h"

#include <array>
#include <atomic>
#include <utility>

namespace xla_gpu::pjrt {
namespace {

std::array<Entry, kBufferCopyToMemory + 1> wrapped = {};  // set once, before an entry can be called
std::atomic<bool> in_use{false};

thread_local bool noting_buffers = false;
thread_local std::vector<void*> noted_buffers;

template <size_t kEntry>
void* CallWithCurrent(void* untyped) {
  auto* args = static_cast<BufferArgs*>(untyped);  // how all of these begin
  if constexpr (kEntry == kBufferUnsafePointer) {
    if (noting_buffers) {
      noted_buffers.push_back(args->buffer);
      args->out = nullptr;
      return nullptr;
    }
  }
  if (!CurrentBuffersInUse()) return wrapped[kEntry](untyped);
  std::shared_ptr<CurrentBuffer> behind;
  void* const given = args->buffer;
  {
    const auto lock = TheCurrentBuffers().Lock();
    behind = TheCurrentBuffers().Behind(given);
  }
  if (behind != nullptr) args->buffer = behind->buffer();
  void* const error = wrapped[kEntry](untyped);
  args->buffer = given;
  return error;
}

void* DestroyWithCurrent(void* args) {
  if (CurrentBuffersInUse()) {
    std::shared_ptr<CurrentBuffer> current;  // destroyed without the lock
    const auto lock = TheCurrentBuffers().Lock();
    current = TheCurrentBuffers().Remove(static_cast<BufferArgs*>(args)->buffer);
  }
  return wrapped[kBufferDestroy](args);
}

template <size_t... kBehindDestroy>
void WrapEach(Entry* entries, std::index_sequence<kBehindDestroy...>) {
  const auto wrap = [&](size_t entry, Entry front) {
    wrapped[entry] = entries[entry];
    if (entries[entry] != nullptr) entries[entry] = front;
  };
  (wrap(kBufferDestroy + 1 + kBehindDestroy, CallWithCurrent<kBufferDestroy + 1 + kBehindDestroy>), ...);
  wrap(kBufferCopyToMemory, CallWithCurrent<kBufferCopyToMemory>);
  wrap(kBufferDestroy, DestroyWithCurrent);
}

}  // namespace

CurrentBuffer::~CurrentBuffer() {
  BufferArgs args = {kBufferArgsWithoutOut, nullptr, buffer_, nullptr};
  wrapped[kBufferDestroy](&args);
}

std::shared_ptr<CurrentBuffer> CurrentBuffers::Behind(void* buffer) const {
  const auto found = buffers_.find(buffer);
  return found == buffers_.end() ? nullptr : found->second;
}

void* CurrentBuffers::Of(void* buffer, KeptBuffers* kept) const {
  std::shared_ptr<CurrentBuffer> behind = Behind(buffer);
  if (behind == nullptr) return buffer;
  kept->push_back(std::move(behind));
  return kept->back()->buffer();
}

void CurrentBuffers::Update(void* buffer, void* current, KeptBuffers* kept) {
  kept->push_back(std::make_shared<CurrentBuffer>(current));
  const auto found = buffers_.find(buffer);
  // Destroyed meanwhile: an entry for it would be the one of a later buffer of this address.
  if (found != buffers_.end()) std::swap(found->second, kept->back());
}

std::shared_ptr<CurrentBuffer> CurrentBuffers::Remove(void* buffer) {
  const auto found = buffers_.find(buffer);
  if (found == buffers_.end()) return nullptr;
  std::shared_ptr<CurrentBuffer> current = std::move(found->second);
  buffers_.erase(found);
  return current;
}

CurrentBuffers& TheCurrentBuffers() {
  static auto* const buffers = new CurrentBuffers;  // threads of the plug-in may outlive main()
  return *buffers;
}

void WrapBufferEntries(Entry* entries) {
  WrapEach(entries, std::make_index_sequence<kBufferOpaqueDeviceMemoryDataPointer - kBufferDestroy>());
}
bool HaveCurrentBuffers() { return wrapped[kBufferDestroy] != nullptr; }
void UseCurrentBuffers() { in_use.store(true, std::memory_order_release); }
bool CurrentBuffersInUse() { return in_use.load(std::memory_order_acquire); }

void NoteBuffers() {
  noting_buffers = true;
  noted_buffers.clear();
}
std::vector<void*> TakeNotedBuffers() {
  noting_buffers = false;
  return std::exchange(noted_buffers, {});
}

}  // namespace xla_gpu::pjrt
