#include "ffi/runtime/recorded_programs.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <utility>

#include "ffi/runtime/pjrt_plugin.h"

namespace xla_gpu::pjrt {

bool RecordedPrograms::InUse() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return recording_ || !executables_.empty();
}

void RecordedPrograms::SetRecording(bool recording) {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = recording;
}

void* RecordedPrograms::Take(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = executables_.find(key);
  if (found == executables_.end()) return nullptr;
  void* const executable = found->second;
  executables_.erase(found);
  return executable;
}

bool RecordedPrograms::Record(const std::string& key, const ClientCompileArgs& args) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!recording_) return false;
  const bool known =
      std::any_of(recorded_.begin(), recorded_.end(), [&](const Recorded& other) { return other.key == key; });
  if (!known) {
    recorded_.push_back({key,
                         {args.program->code, args.program->code_size},
                         {args.program->format, args.program->format_size},
                         {args.compile_options, args.compile_options_size},
                         args.client});
  }
  return true;
}

size_t RecordedPrograms::CompileAll(int threads, const Api& api, const Compile& compile) {
  std::vector<Recorded> programs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    programs.swap(recorded_);
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t index = next++; index < programs.size(); index = next++) {
      const Recorded& recorded = programs[index];
      const Program program = {sizeof(Program),        nullptr,
                               recorded.code.data(),   recorded.code.size(),
                               recorded.format.data(), recorded.format.size()};
      ClientCompileArgs args = {
          sizeof args, nullptr, recorded.client, &program, recorded.options.data(), recorded.options.size(), nullptr};
      try {
        if (!TakeError(api, compile(recorded.key, &args)).ok()) continue;
        std::lock_guard<std::mutex> lock(mutex_);
        executables_.emplace(recorded.key, args.executable);
      } catch (...) {  // no memory: the program is compiled when it is needed
      }
    }
  };
  std::vector<std::thread> workers;
  const size_t wanted = std::min<size_t>(std::max(threads, 1), programs.size());
  for (size_t i = 1; i < wanted; ++i) {
    try {
      workers.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads: those that there are do all
      break;
    }
  }
  work();
  for (std::thread& worker : workers) worker.join();
  std::lock_guard<std::mutex> lock(mutex_);
  return executables_.size();
}

}  // namespace xla_gpu::pjrt
