#include "ffi/host/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

namespace xla_gpu {
namespace {

// Shared by the caller and the tasks it scheduled. A task may start after the caller has returned: then every item is
// claimed already, and the task touches nothing but this state.
struct Loop {
  Loop(int64_t count, const std::function<void(int64_t)>* body) : count(count), body(body) {}

  const int64_t count;
  const std::function<void(int64_t)>* const body;  // lives in the caller's frame: valid only while an item is claimed
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;

  void Work() {
    for (;;) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      (*body)(i);
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
        // The lock keeps the notification from falling between the caller's test and its wait.
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_one();
      }
    }
  }

  void Wait() {
    if (done.load(std::memory_order_acquire) == count) return;
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done.load(std::memory_order_acquire) == count; });
  }
};

}  // namespace

void ParallelFor(const Executor& executor, int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t helpers = std::min(executor.num_threads(), count - 1);
  std::shared_ptr<Loop> loop;
  if (helpers > 0) {
    try {
      loop = std::make_shared<Loop>(count, &body);
    } catch (const std::exception&) {
      // No memory for the shared state: the caller does all of it.
    }
  }
  if (loop == nullptr) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  try {
    for (int64_t i = 0; i < helpers; ++i) executor.Schedule([loop] { loop->Work(); });
  } catch (const std::exception&) {
    // Fewer tasks than requested. Items are claimed one by one, so none is lost.
  }
  loop->Work();
  loop->Wait();
}

}  // namespace xla_gpu
