// The library's threads under ThreadSanitizer: loops from many threads at once, loops inside loops, futures that
// another thread completes. A program of its own, since ThreadSanitizer must be in a process from its start.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <thread>
#include <vector>

#include "ffi/host/parallel_for.h"
#include "ffi/host/thread_pool.h"
#include "ffi/runtime/ffi_api.h"

namespace {

using xla_gpu::ParallelFor;
using xla_gpu::ThreadPool;

std::atomic<int> failures{0};

void Check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "failed: %s\n", what);
  ++failures;
}

// Items write plain memory: what a missing happens-before would show in.
void Loops(int64_t count) {
  std::vector<int64_t> items(static_cast<size_t>(count), 0);
  ParallelFor(ThreadPool::Instance(), count, [&](int64_t i) { items[static_cast<size_t>(i)] += i + 1; });
  Check(std::accumulate(items.begin(), items.end(), int64_t{0}) == count * (count + 1) / 2, "every item once");
}

void NestedLoops() {
  std::vector<std::vector<int64_t>> rows(9, std::vector<int64_t>(17, 0));
  ParallelFor(ThreadPool::Instance(), 9, [&](int64_t row) {
    ParallelFor(ThreadPool::Instance(), 17, [&, row](int64_t i) { rows[row][i] = row * i; });
  });
  for (int64_t row = 0; row < 9; ++row) Check(rows[row][16] == row * 16, "loops inside loops");
}

// A handler's future, completed by a thread of the pool while the caller waits, and the context's own locks.
void Futures() {
  const XLA_FFI_Api* api = xla_gpu::FfiApi();
  int64_t value = 0;
  XLA_FFI_Future_Create_Args create = {};
  create.struct_size = XLA_FFI_Future_Create_Args_STRUCT_SIZE;
  Check(api->XLA_FFI_Future_Create(&create) == nullptr, "creating a future");
  XLA_FFI_Future* future = create.future;
  ThreadPool::Instance().Schedule([api, future, &value] {
    value = 7;
    XLA_FFI_Future_SetAvailable_Args set = {};
    set.struct_size = XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE;
    set.future = future;
    api->XLA_FFI_Future_SetAvailable(&set);
  });
  Check(xla_gpu::TakeFuture(future).ok(), "a future's result");
  Check(value == 7, "what was written before a future's completion");

  XLA_FFI_ExecutionContext context(nullptr, -1);
  ParallelFor(ThreadPool::Instance(), 8, [&](int64_t i) {
    XLA_FFI_DeviceMemory_Allocate_Args allocate = {};
    allocate.struct_size = XLA_FFI_DeviceMemory_Allocate_Args_STRUCT_SIZE;
    allocate.ctx = &context;
    allocate.size = 64;
    allocate.alignment = 64;
    Check(api->XLA_FFI_DeviceMemory_Allocate(&allocate) == nullptr, "allocating");
    if (i % 2 == 0) return;  // the context frees what is left
    XLA_FFI_DeviceMemory_Free_Args free_args = {};
    free_args.struct_size = XLA_FFI_DeviceMemory_Free_Args_STRUCT_SIZE;
    free_args.ctx = &context;
    free_args.size = 64;
    free_args.data = allocate.data;
    Check(api->XLA_FFI_DeviceMemory_Free(&free_args) == nullptr, "freeing");
  });
}

}  // namespace

int main() {
  setenv("XLA_GPU_NUM_THREADS", "4", 1);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([thread] {
      for (int64_t round = 0; round < 300; ++round) {
        Loops((round * 7 + thread) % 100);
        if (round % 3 == 0) NestedLoops();
        Futures();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d failures\n", failures.load());
  return failures == 0 ? 0 : 1;
}
