#include "ffi/host/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <utility>

#include "ffi/host/processors.h"

namespace xla_gpu {
namespace {

constexpr int64_t kMaxThreads = 1024;

int64_t WantedThreads() {
  if (const char* text = std::getenv("XLA_GPU_NUM_THREADS"); text != nullptr) {
    char* end = nullptr;
    const int64_t requested = std::strtoll(text, &end, 10);
    if (end != text && *end == '\0' && requested >= 1) return std::min(requested, kMaxThreads);
    // As OpenMP's libraries do: a call has no way to fail here that its user would understand.
    std::fprintf(stderr, "xla_gpu: XLA_GPU_NUM_THREADS: expected an integer of 1 or more, got \"%s\": not used\n",
                 text);
  }
  return std::min(UsableProcessors(), kMaxThreads);
}

// Atomic instead of a function-local static: a child of fork() must forget its parent's pool, whose threads it lacks
// and whose mutex may be locked for ever.
std::atomic<ThreadPool*> instance{nullptr};

void ForgetInstance() { instance.store(nullptr, std::memory_order_release); }

}  // namespace

struct ThreadPool::State {
  const int64_t workers = WantedThreads() - 1;
  std::mutex mutex;
  std::condition_variable work_arrived;
  std::deque<std::function<void()>> queue;
  int64_t started = 0;
  bool start_tried = false;

  [[noreturn]] static void* Work(void* pointer) {
    auto* state = static_cast<State*>(pointer);
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(state->mutex);
        state->work_arrived.wait(lock, [state] { return !state->queue.empty(); });
        task = std::move(state->queue.front());
        state->queue.pop_front();
      }
      task();
    }
  }

  // Called with the mutex held. Where the system starts fewer threads than requested, those that started do the work.
  void StartOnce() {
    if (start_tried) return;
    start_tried = true;
    // Signals belong to the application's threads.
    sigset_t all, before;
    sigfillset(&all);
    const bool masked = pthread_sigmask(SIG_SETMASK, &all, &before) == 0;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) == 0) {
      pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
      pthread_t thread;
      while (started < workers && pthread_create(&thread, &attributes, &Work, this) == 0) ++started;
      pthread_attr_destroy(&attributes);
    }
    if (masked) pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
};

ThreadPool::ThreadPool() : state_(new State) {}
ThreadPool::~ThreadPool() { delete state_; }

const ThreadPool& ThreadPool::Instance() {
  ThreadPool* pool = instance.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  static const int at_fork = pthread_atfork(nullptr, nullptr, &ForgetInstance);
  static_cast<void>(at_fork);
  auto* fresh = new ThreadPool;
  if (instance.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;  // another thread was first; this one has no threads yet
  return *pool;
}

int64_t ThreadPool::num_threads() const { return state_->workers; }

void ThreadPool::Schedule(std::function<void()> task) const {
  {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->StartOnce();
    if (state_->started > 0) {
      state_->queue.push_back(std::move(task));
      lock.unlock();
      state_->work_arrived.notify_one();
      return;
    }
  }
  task();
}

}  // namespace xla_gpu
