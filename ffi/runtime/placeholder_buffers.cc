// Placeholders: buffers in the place of which an execution gets views of another framework's memory.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ffi/runtime/buffer_views.h"
#include "ffi/runtime/shared_buffers.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu::pjrt {
namespace {

struct View {
  const void* memory;
  void* buffer;
};
constexpr size_t kMaxViews = 8;  // of a placeholder

struct Placeholder {
  int64_t id;
  ViewShape shape;
  void* device;
  const void* bound = nullptr;  // null: nothing
  intptr_t ready_stream = 0;
  std::vector<View> views = {};  // of memory that was bound before: allocators hand out the same again
};

std::mutex placeholders_mutex;  // of the tables below
std::atomic<size_t> num_placeholders{0};
std::unordered_map<void*, std::unique_ptr<Placeholder>>& PlaceholdersByBuffer() {
  static auto* const table = new std::unordered_map<void*, std::unique_ptr<Placeholder>>;
  return *table;
}
std::unordered_map<int64_t, Placeholder*>& PlaceholdersById() {
  static auto* const table = new std::unordered_map<int64_t, Placeholder*>;
  return *table;
}

Error BindPlaceholders(const int64_t* ids, const void* const* data, size_t count, void* stream) {
  GiveBackReturned();
  std::lock_guard<std::mutex> lock(placeholders_mutex);
  intptr_t ready = 0;
  bool is_ordered = false;  // are the views of device `ordered`
  void* ordered = nullptr;
  for (size_t i = 0; i < count; ++i) {
    const auto found = PlaceholdersById().find(ids[i]);
    if (found == PlaceholdersById().end()) {
      return Error::InvalidArgument("xla_gpu_bind_placeholders: " + std::to_string(ids[i]) + " is no placeholder");
    }
    Placeholder& placeholder = *found->second;
    placeholder.bound = nullptr;
    if (data == nullptr || data[i] == nullptr) continue;
    if (!is_ordered || placeholder.device != ordered) {
      if (Error error = OrderViews(stream, placeholder.device, &ready); !error.ok()) return error;
      ordered = placeholder.device;
      is_ordered = true;
    }
    placeholder.ready_stream = ready;
    placeholder.bound = data[i];
  }
  return {};
}

}  // namespace

void AddPlaceholder(int64_t id, void* buffer, ViewShape shape, void* device) {
  std::lock_guard<std::mutex> lock(placeholders_mutex);
  auto placeholder = std::make_unique<Placeholder>(Placeholder{id, std::move(shape), device});
  PlaceholdersById()[id] = placeholder.get();
  PlaceholdersByBuffer()[buffer] = std::move(placeholder);
  num_placeholders.store(PlaceholdersByBuffer().size(), std::memory_order_release);
}

void RemovePlaceholder(void* buffer) {
  if (num_placeholders.load(std::memory_order_acquire) == 0) return;
  std::unique_ptr<Placeholder> removed;
  {
    std::lock_guard<std::mutex> lock(placeholders_mutex);
    const auto found = PlaceholdersByBuffer().find(buffer);
    if (found == PlaceholdersByBuffer().end()) return;
    removed = std::move(found->second);
    PlaceholdersByBuffer().erase(found);
    PlaceholdersById().erase(removed->id);
    num_placeholders.store(PlaceholdersByBuffer().size(), std::memory_order_release);
  }
  for (const View& view : removed->views) CallBufferEntry(kBufferDestroy, view.buffer, nullptr);
}

BoundArguments::BoundArguments(LoadedExecutableExecuteArgs* args) : args_(args), given_(args->argument_lists) {
  if (num_placeholders.load(std::memory_order_acquire) == 0) return;
  error_ = Guarded("binding placeholders", [&] { return Bind(); });
}

Error BoundArguments::Bind() {
  std::lock_guard<std::mutex> lock(placeholders_mutex);
  for (size_t device = 0; device < args_->num_devices; ++device) {
    // One view that is made now makes the execution wait for the other framework's stream. That serves for all.
    bool ordered = false;
    for (size_t i = 0; i < args_->num_args; ++i) {
      const auto found = PlaceholdersByBuffer().find(given_[device][i]);
      if (found == PlaceholdersByBuffer().end()) continue;
      Placeholder& placeholder = *found->second;
      if (placeholder.bound == nullptr) {
        return Error::FailedPrecondition("argument " + std::to_string(i) +
                                         " of an execution is a placeholder that no memory was bound to");
      }
      auto& views = placeholder.views;
      auto view = std::find_if(views.begin(), views.end(),
                               [&](const View& known) { return known.memory == placeholder.bound; });
      if (!ordered || view == views.end()) {
        View made = {placeholder.bound, nullptr};
        if (Error error =
                CreateView(placeholder.shape, made.memory, placeholder.ready_stream, nullptr, nullptr, &made.buffer);
            !error.ok()) {
          return error;
        }
        if (view == views.end() && views.size() == kMaxViews) view = views.begin();  // the oldest
        if (view != views.end()) {
          replaced_.push_back(view->buffer);
          views.erase(view);
        }
        view = views.insert(views.end(), made);
        ordered = true;
      }
      if (lists_.empty()) {
        for (size_t d = 0; d < args_->num_devices; ++d) {
          lists_.emplace_back(given_[d], given_[d] + args_->num_args);
          pointers_.push_back(lists_.back().data());
        }
        args_->argument_lists = pointers_.data();
      }
      lists_[device][i] = view->buffer;
    }
  }
  return {};
}

BoundArguments::~BoundArguments() {
  args_->argument_lists = given_;
  for (void* view : replaced_) CallBufferEntry(kBufferDestroy, view, nullptr);
}

}  // namespace xla_gpu::pjrt

extern "C" const char* xla_gpu_bind_placeholders(const int64_t* ids, const void* const* data, size_t count,
                                                 void* stream) {
  return xla_gpu::Report(xla_gpu::Guarded("xla_gpu_bind_placeholders",
                                          [&] { return xla_gpu::pjrt::BindPlaceholders(ids, data, count, stream); }));
}
