// Compiled executables kept in files, so that a process need not compile what another one compiled before.
//
// torch_xla 2.9's own persistent cache cannot do that: its loader is not implemented for any client.
#ifndef XLA_GPU_RUNTIME_EXECUTABLE_CACHE_H_
#define XLA_GPU_RUNTIME_EXECUTABLE_CACHE_H_

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/runtime/pjrt_abi_executables.h"
#include "ffi/runtime/preloaded_executables.h"
#include "ffi/runtime/recorded_programs.h"

namespace xla_gpu::pjrt {

// The folder. Unset or empty: nothing is kept.
inline constexpr char kExecutableCacheVariable[] = "XLA_GPU_EXECUTABLE_CACHE";

struct ExecutableCacheCounts {
  int64_t loaded;    // executables that came from a file
  int64_t compiled;  // executables that XLA compiled while the cache was on
  int64_t stored;    // of those, the ones that were written to a file
  int64_t unusable;  // files that were damaged, or that the plug-in refused
};
ExecutableCacheCounts CountExecutables();

// PJRT_Client_Compile of a plug-in with the cache in front. A file holds all that the executable depends on, and is
// used where every byte of that agrees: the program, its compile options, the plug-in (version, size and time of its
// file), the kind and number of the GPUs, XLA_FLAGS, and this library's version. A file that cannot be read, is damaged
// or is refused by the plug-in counts as missing.
class ExecutableCache {
 public:
  ExecutableCache(const Api& api, const std::string& plugin_path);

  // Returns what PJRT_Client_Compile returns: an error of the plug-in, or null.
  void* Compile(ClientCompileArgs* args);

  // Appends these bytes to the compile options of each program from now on. The options are a serialised
  // CompileOptionsProto, so that appended fields take the place of single ones and are added to lists and maps.
  void SetAppendedOptions(std::string bytes);

  // Begins to load files of the folder in threads, see preloaded_executables.h: for the client that has compiled last,
  // whose compilations alone get them.
  void StartPreloading(const std::vector<std::string>& names, int threads);
  void FinishPreloading();
  // Names of the files that compilations of this process took executables from, or wrote.
  std::vector<std::string> UsedFiles();

  // See recorded_programs.h.
  void SetRecording(bool recording) { recorded_.SetRecording(recording); }
  size_t StartRecorded(int threads);
  size_t FinishRecorded(bool drop) { return recorded_.Finish(drop); }

 private:
  // Compiles with the options that `args` has.
  void* CompileWithOptions(ClientCompileArgs* args);
  // What names the executable, or nothing where the plug-in does not tell.
  std::string Key(const ClientCompileArgs& args) const;
  bool Load(const std::string& file, const std::string& key, ClientCompileArgs* args) const;
  // The executable in a file, and what it is kept under. Null, and counted as unusable, where the file is damaged or
  // refused by the plug-in; where `expected` is given, null too where the file is of something else.
  void* LoadFile(const std::string& file, void* client, const std::string* expected, std::string* key) const;
  void NoteUsed(const std::string& file) const;
  bool Store(const std::string& folder, const std::string& file, const std::string& key, void* loaded) const;
  // Compiles, and stores in the folder unless that is empty.
  void* CompileAndStore(const std::string& folder, const std::string& key, ClientCompileArgs* args) const;
  // Calls an entry with `args`, whose sizes it fills in; false, and no error left behind, where that fails.
  template <typename Args>
  bool Call(size_t entry, Args* args) const;

  const Api& api_;
  std::string plugin_;  // version, size and time
  RecordedPrograms recorded_;
  PreloadedExecutables preloaded_;
  mutable std::mutex used_mutex_;  // of what follows
  mutable std::vector<std::string> used_;
  void* client_ = nullptr;             // that has compiled last
  void* preloading_client_ = nullptr;  // that executables are loaded ahead for
  std::mutex options_mutex_;           // of what follows
  std::string appended_options_;
};

}  // namespace xla_gpu::pjrt

#endif  // XLA_GPU_RUNTIME_EXECUTABLE_CACHE_H_
