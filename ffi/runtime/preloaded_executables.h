// Kept executables that threads load before they are compiled: while a model's weights are read, for example.
#ifndef XLA_GPU_RUNTIME_PRELOADED_EXECUTABLES_H_
#define XLA_GPU_RUNTIME_PRELOADED_EXECUTABLES_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace xla_gpu::pjrt {

// By the files that hold them.
class PreloadedExecutables {
 public:
  // Loads a file's executable and tells what it is kept under; null where it cannot be loaded.
  using Load = std::function<void*(const std::string& file, std::string* key)>;

  // Begins to load files in threads. Finish must have ended those of an earlier call.
  void Start(const std::vector<std::string>& files, int threads, const Load& load);

  // The executable of a file, which is the caller's, where it is kept under `key`; waits for a thread that is loading
  // it. Null where there is none, or where no thread has begun.
  void* Take(const std::string& file, const std::string& key);

  // Ends the threads, and returns the executables that were not taken.
  std::vector<void*> Finish();

 private:
  struct Entry {
    bool loading = false;
    std::string key;
    void* executable = nullptr;
  };
  bool LoadNext(const Load& load);

  std::mutex mutex_;
  std::condition_variable loaded_;
  std::deque<std::string> waiting_;
  std::map<std::string, Entry> entries_;  // of files that a thread has begun
  std::vector<std::thread> workers_;
};

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_PRELOADED_EXECUTABLES_H_
