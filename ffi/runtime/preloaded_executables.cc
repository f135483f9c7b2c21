#include "ffi/runtime/preloaded_executables.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace xla_gpu::pjrt {

bool PreloadedExecutables::LoadNext(const Load& load) {
  std::string file;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiting_.empty()) return false;
    file = std::move(waiting_.front());
    waiting_.pop_front();
    entries_[file].loading = true;
  }
  std::string key;
  void* executable = nullptr;
  try {
    executable = load(file, &key);
  } catch (...) {  // no memory: it is loaded when it is needed
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[file];
  entry.loading = false;
  entry.key = std::move(key);
  entry.executable = executable;
  loaded_.notify_all();
  return true;
}

void PreloadedExecutables::Start(const std::vector<std::string>& files, int threads, const Load& load) {
  std::lock_guard<std::mutex> lock(mutex_);
  waiting_.assign(files.begin(), files.end());
  for (int i = 0; i < std::max(threads, 1); ++i) {
    try {
      workers_.emplace_back([this, load] {
        try {
          while (LoadNext(load)) {
          }
        } catch (...) {  // no memory
        }
      });
    } catch (const std::system_error&) {  // no more threads: those that there are do all
      break;
    }
  }
}

void* PreloadedExecutables::Take(const std::string& file, const std::string& key) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (const auto at = std::find(waiting_.begin(), waiting_.end(), file); at != waiting_.end()) {
    waiting_.erase(at);
    return nullptr;
  }
  // Sought again after each wait: Finish clears the entries.
  auto found = entries_.find(file);
  while (found != entries_.end() && found->second.loading) {
    loaded_.wait(lock);
    found = entries_.find(file);
  }
  if (found == entries_.end() || found->second.key != key) return nullptr;
  return std::exchange(found->second.executable, nullptr);
}

std::vector<void*> PreloadedExecutables::Finish() {
  std::vector<std::thread> workers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.clear();
    workers.swap(workers_);
  }
  for (std::thread& worker : workers) worker.join();
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<void*> left;
  for (const auto& [file, entry] : entries_) {
    if (entry.executable != nullptr) left.push_back(entry.executable);
  }
  entries_.clear();
  return left;
}

}  // namespace xla_gpu::pjrt
