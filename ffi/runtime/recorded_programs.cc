#include "ffi/runtime/recorded_programs.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "ffi/runtime/pjrt_plugin.h"

namespace xla_gpu::pjrt {

bool RecordedPrograms::InUse() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return recording_ || !executables_.empty() || !pending_.empty();
}

void RecordedPrograms::SetRecording(bool recording) {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = recording;
}

void* RecordedPrograms::Take(void* client, const std::string& key) {
  const ClientAndKey id(client, key);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!recording_) {
    compiled_.wait(lock, [&] { return pending_.count(id) == 0 || working_ == 0; });
  }
  const auto found = executables_.find(id);
  if (found == executables_.end()) return nullptr;
  void* const executable = found->second;
  executables_.erase(found);
  return executable;
}

bool RecordedPrograms::Record(const std::string& key, const ClientCompileArgs& args) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!recording_) return false;
  const ClientAndKey id(args.client, key);
  if (pending_.count(id) == 0 && executables_.count(id) == 0) {
    waiting_.push_back({id,
                        {args.program->code, args.program->code_size},
                        {args.program->format, args.program->format_size},
                        {args.compile_options, args.compile_options_size}});
    pending_.insert(id);
    recorded_.notify_one();
  }
  return true;
}

bool RecordedPrograms::CompileNext(const Api& api, const Compile& compile) {
  Recorded recorded;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    recorded_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
    if (waiting_.empty()) {
      --working_;
      compiled_.notify_all();
      return false;
    }
    recorded = std::move(waiting_.front());
    waiting_.pop_front();
  }
  const Program program = {sizeof(Program),        nullptr,
                           recorded.code.data(),   recorded.code.size(),
                           recorded.format.data(), recorded.format.size()};
  ClientCompileArgs args = {
      sizeof args, nullptr, recorded.id.first, &program, recorded.options.data(), recorded.options.size(), nullptr};
  bool ok = false;
  try {
    ok = TakeError(api, compile(recorded.id.second, &args)).ok();
  } catch (...) {  // no memory: the program is compiled when it is needed
  }
  std::lock_guard<std::mutex> lock(mutex_);
  try {
    if (ok) executables_.emplace(recorded.id, args.executable);
  } catch (...) {  // the same
  }
  pending_.erase(recorded.id);
  compiled_.notify_all();
  return true;
}

size_t RecordedPrograms::Start(int threads, const Api& api, const Compile& compile) {
  Finish(/*drop=*/false);
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < std::max(threads, 1); ++i) {
    try {
      workers_.emplace_back([this, &api, compile] {
        while (CompileNext(api, compile)) {
        }
      });
      ++working_;
    } catch (const std::system_error&) {  // no more threads: those that there are do all
      break;
    }
  }
  return waiting_.size();
}

size_t RecordedPrograms::Finish(bool drop) {
  std::lock_guard<std::mutex> finishing(finish_mutex_);
  std::vector<std::thread> workers;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    workers.swap(workers_);
    if (drop) Drop();
    closing_ = true;
    recorded_.notify_all();
  }
  for (std::thread& worker : workers) worker.join();
  std::lock_guard<std::mutex> lock(mutex_);
  closing_ = false;
  return executables_.size();
}

void RecordedPrograms::Drop() {
  for (const Recorded& recorded : waiting_) pending_.erase(recorded.id);
  waiting_.clear();
}

}  // namespace xla_gpu::pjrt
