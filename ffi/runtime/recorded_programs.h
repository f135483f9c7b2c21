// Programs that are recorded in place of being compiled, and compiled together later, in several threads.
//
// torch_xla compiles one program at a time, under a lock. A framework that knows which programs it will need captures
// all of them while recording: each compilation fails, and leaves its program here. Then it has them compiled together,
// and captures them again.
#ifndef XLA_GPU_RUNTIME_RECORDED_PROGRAMS_H_
#define XLA_GPU_RUNTIME_RECORDED_PROGRAMS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/runtime/pjrt_abi.h"

namespace xla_gpu::pjrt {

class RecordedPrograms {
 public:
  // Compiles a program, and stores its executable where that is configured; returns an error of the plug-in, or null.
  using Compile = std::function<void*(const std::string& key, ClientCompileArgs* args)>;

  // Whether a compilation need ask for its key here: programs are being recorded, or compiled ones wait to be fetched.
  bool InUse() const;
  void SetRecording(bool recording);

  // The executable of the program with that key, once; or null.
  void* Take(const std::string& key);
  // Notes the program where programs are being recorded. The caller's compilation must fail then.
  bool Record(const std::string& key, const ClientCompileArgs& args);

  // Compiles what was recorded, in up to `threads` threads; returns the number of executables that wait to be fetched.
  // A program that cannot be compiled is dropped: its next compilation gets the error.
  size_t CompileAll(int threads, const Api& api, const Compile& compile);

 private:
  struct Recorded {
    std::string key, code, format, options;
    void* client;
  };

  mutable std::mutex mutex_;  // of what follows
  bool recording_ = false;
  std::vector<Recorded> recorded_;
  std::map<std::string, void*> executables_;  // by key
};

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_RECORDED_PROGRAMS_H_
