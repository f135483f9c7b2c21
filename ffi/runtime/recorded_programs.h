// Programs that are recorded in place of being compiled, and compiled in threads of their own.
//
// torch_xla compiles one program at a time, under a lock. A framework that knows which programs it will need captures
// all of them while recording: each compilation fails, and leaves its program here. Threads compile them, at once or
// when all are recorded, and the framework captures them again. That waits for the executable of each.
#ifndef XLA_GPU_RUNTIME_RECORDED_PROGRAMS_H_
#define XLA_GPU_RUNTIME_RECORDED_PROGRAMS_H_

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/runtime/pjrt_abi_executables.h"

namespace xla_gpu::pjrt {

class RecordedPrograms {
 public:
  // Compiles a program, and stores its executable where that is configured; returns an error of the plug-in, or null.
  using Compile = std::function<void*(const std::string& key, ClientCompileArgs* args)>;

  // Whether a compilation must look for its key here: programs are being recorded, or compiled ones wait to be fetched.
  bool InUse() const;
  void SetRecording(bool recording);

  // The client's executable of the program with that key, once; or null. Where programs are not being recorded any
  // more, waits for a thread that has it to compile.
  void* Take(void* client, const std::string& key);
  // Notes the program where programs are being recorded. The caller's compilation must fail then.
  bool Record(const std::string& key, const ClientCompileArgs& args);

  // Starts threads that compile what was recorded and what is recorded from now on, in that order; returns the number
  // of programs so far. A program that cannot be compiled is dropped: its next compilation gets the error.
  size_t Start(int threads, const Api& api, const Compile& compile);
  // Ends the threads when nothing is left to compile, or with `drop` when each has compiled what it has begun. Returns
  // the number of executables that wait to be fetched.
  size_t Finish(bool drop);

 private:
  // An executable is of the client that it was compiled for, and keys do not name that: they are kept in files.
  using ClientAndKey = std::pair<void*, std::string>;
  struct Recorded {
    ClientAndKey id;
    std::string code, format, options;
  };

  // Compiles the next program, for which it waits; false: there is none, and none will come.
  bool CompileNext(const Api& api, const Compile& compile);
  void Drop();

  std::mutex finish_mutex_;   // one ends the threads at a time; locked before the next one
  mutable std::mutex mutex_;  // of what follows
  std::condition_variable recorded_, compiled_;
  bool recording_ = false, closing_ = false;
  std::deque<Recorded> waiting_;
  std::set<ClientAndKey> pending_;  // programs that wait or are being compiled
  std::map<ClientAndKey, void*> executables_;
  std::vector<std::thread> workers_;
  int working_ = 0;  // threads that have not ended
};

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_RECORDED_PROGRAMS_H_
