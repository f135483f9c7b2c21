#include "ffi/runtime/executable_cache.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "ffi/runtime/error.h"
#include "ffi/runtime/pjrt_abi_executables.h"
#include "ffi/runtime/pjrt_plugin.h"
#include "ffi/runtime/xla_gpu.h"

namespace xla_gpu::pjrt {
namespace {

// The format of programs that are recorded: no plug-in's.
constexpr char kRecordedFormat[] = "recorded by xla_gpu";

std::atomic<int64_t> loaded{0}, compiled{0}, stored{0}, unusable{0};

// ---- The file: a header, the key, the executable ----

constexpr char kMagic[16] = "xla_gpu-exec-1\n";  // another form of the file gets another number

struct Header {
  char magic[sizeof kMagic];
  uint64_t key_size;
  uint64_t executable_size;
  uint64_t checksum;  // of key and executable
};

// FNV-1a over words of 8 bytes, the last one padded with zeros. It finds damage and names files; what decides whether a
// file is the right one is the comparison of the whole key.
uint64_t Hash(std::string_view bytes, uint64_t hash = 14695981039346656037ull) {
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, bytes.size() - at < 8 ? bytes.size() - at : 8);
    hash = (hash ^ word) * 1099511628211ull;
    hash ^= hash >> 32;
  }
  return hash;
}

// Appends a part with its name and length, so that two lists of parts never make the same key.
void Append(std::string* key, std::string_view name, std::string_view part) {
  key->append(name).append(" ").append(std::to_string(part.size())).append("\n").append(part).append("\n");
}

std::string FileName(const std::string& folder, const std::string& key) {
  char name[17];
  std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(Hash(key)));
  return folder + "/" + name;
}

std::string_view Environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

bool ReadFile(const std::string& path, std::string* contents) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return false;
  const std::streamoff size = in.tellg();
  if (size < 0) return false;
  contents->resize(static_cast<size_t>(size));
  in.seekg(0);
  return static_cast<bool>(in.read(contents->data(), size));
}

// Each process writes a file of its own and renames it: readers see a whole file or none.
bool WriteFile(const std::string& folder, const std::string& path, std::initializer_list<std::string_view> parts) {
  static std::atomic<int> number{0};
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string temporary = path + "." + std::to_string(getpid()) + "." + std::to_string(number++) + ".tmp";
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  for (const std::string_view part : parts) out.write(part.data(), static_cast<std::streamsize>(part.size()));
  out.close();
  if (out && std::rename(temporary.c_str(), path.c_str()) == 0) return true;
  const int reason = errno;
  std::remove(temporary.c_str());
  static std::atomic<bool> said{false};
  if (!said.exchange(true)) {
    std::fprintf(stderr, "xla_gpu: %s: cannot write %s (%s); executables are compiled and not kept\n",
                 kExecutableCacheVariable, path.c_str(), std::strerror(reason));
  }
  return false;
}

}  // namespace

ExecutableCacheCounts CountExecutables() { return {loaded, compiled, stored, unusable}; }

ExecutableCache::ExecutableCache(const Api& api, const std::string& plugin_path) : api_(api) {
  struct stat file = {};
  if (stat(plugin_path.c_str(), &file) != 0) return;
  plugin_ = VersionText(api.version.major_version, api.version.minor_version) + " " + std::to_string(file.st_size) +
            " " + std::to_string(file.st_mtim.tv_sec) + "." + std::to_string(file.st_mtim.tv_nsec);
}

template <typename Args>
bool ExecutableCache::Call(size_t entry, Args* args) const {
  if (api_.entries()[entry] == nullptr) return false;
  args->struct_size = sizeof *args;
  return TakeError(api_, api_.entries()[entry](args)).ok();
}

std::string ExecutableCache::Key(const ClientCompileArgs& args) const {
  ClientPlatformVersionArgs version = {};
  version.client = args.client;
  ClientAddressableDevicesArgs devices = {};
  devices.client = args.client;
  if (plugin_.empty() || !Call(kClientPlatformVersion, &version) || !Call(kClientAddressableDevices, &devices)) {
    return {};
  }
  std::string key;
  Append(&key, "xla_gpu", XLA_GPU_VERSION);
  Append(&key, "plug-in", plugin_);
  Append(&key, "platform", {version.platform_version, version.platform_version_size});
  for (size_t i = 0; i < devices.num_devices; ++i) {
    DeviceGetDescriptionArgs description = {};
    description.device = devices.devices[i];
    DeviceDescriptionKindArgs kind = {};
    if (!Call(kDeviceGetDescription, &description)) return {};
    kind.description = description.description;
    if (!Call(kDeviceDescriptionKind, &kind)) return {};
    Append(&key, "device", {kind.kind, kind.kind_size});
  }
  for (const char* name : {"XLA_FLAGS", "NVIDIA_TF32_OVERRIDE"}) Append(&key, name, Environment(name));
  Append(&key, "format", {args.program->format, args.program->format_size});
  Append(&key, "options", {args.compile_options, args.compile_options_size});
  Append(&key, "program", {args.program->code, args.program->code_size});
  return key;
}

void* ExecutableCache::LoadFile(const std::string& file, void* client, const std::string* expected,
                                std::string* key) const {
  std::string contents;
  if (!ReadFile(file, &contents)) return nullptr;
  Header header = {};
  if (contents.size() >= sizeof header) std::memcpy(&header, contents.data(), sizeof header);
  const std::string_view body = std::string_view(contents).substr(contents.size() < sizeof header ? 0 : sizeof header);
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0 || header.key_size > body.size() ||
      header.executable_size != body.size() - header.key_size || header.checksum != Hash(body)) {
    ++unusable;
    return nullptr;
  }
  const std::string_view found = body.substr(0, header.key_size);
  if (expected != nullptr && found != *expected) return nullptr;  // another program with the same hash
  if (key != nullptr) *key = found;
  DeserializeAndLoadArgs load = {};
  load.client = client;
  load.bytes = body.data() + header.key_size;
  load.num_bytes = header.executable_size;
  if (Call(kExecutableDeserializeAndLoad, &load) && load.loaded_executable != nullptr) return load.loaded_executable;
  ++unusable;
  return nullptr;
}

bool ExecutableCache::Load(const std::string& file, const std::string& key, ClientCompileArgs* args) const {
  void* const found = LoadFile(file, args->client, &key, nullptr);
  if (found != nullptr) args->executable = found;
  return found != nullptr;
}

void ExecutableCache::NoteUsed(const std::string& file) const {
  std::lock_guard<std::mutex> lock(used_mutex_);
  used_.push_back(std::filesystem::path(file).filename());
}

std::vector<std::string> ExecutableCache::UsedFiles() {
  std::lock_guard<std::mutex> lock(used_mutex_);
  return used_;
}

void ExecutableCache::StartPreloading(const std::vector<std::string>& names, int threads) {
  FinishPreloading();
  const std::string folder(Environment(kExecutableCacheVariable));
  void* client = nullptr;
  {
    std::lock_guard<std::mutex> lock(used_mutex_);
    client = client_;
    preloading_client_ = client;
  }
  if (folder.empty() || client == nullptr) return;
  std::vector<std::string> files;
  for (const std::string& name : names) files.push_back(folder + "/" + name);
  preloaded_.Start(files, threads, [this, client](const std::string& file, std::string* key) {
    return LoadFile(file, client, nullptr, key);
  });
}

void ExecutableCache::FinishPreloading() {
  for (void* const executable : preloaded_.Finish()) {
    ExecutableDestroyArgs destroy = {};
    destroy.executable = executable;
    Call(kLoadedExecutableDestroy, &destroy);
  }
}

bool ExecutableCache::Store(const std::string& folder, const std::string& file, const std::string& key,
                            void* loaded_executable) const {
  LoadedExecutableGetExecutableArgs get = {};
  get.loaded_executable = loaded_executable;
  if (!Call(kLoadedExecutableGetExecutable, &get)) return false;
  ExecutableSerializeArgs serialized = {};
  serialized.executable = get.executable;
  bool written = false;
  if (Call(kExecutableSerialize, &serialized)) {
    const std::string_view executable(serialized.bytes, serialized.num_bytes);
    std::string body;
    body.reserve(key.size() + executable.size());
    body.append(key).append(executable);
    if (serialized.deleter != nullptr) serialized.deleter(serialized.owner);
    Header header = {};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    header.key_size = key.size();
    header.executable_size = body.size() - key.size();
    header.checksum = Hash(body);
    written = WriteFile(folder, file, {{reinterpret_cast<const char*>(&header), sizeof header}, body});
  }
  ExecutableDestroyArgs destroy = {};
  destroy.executable = get.executable;
  Call(kExecutableDestroy, &destroy);
  return written;
}

void* ExecutableCache::CompileAndStore(const std::string& folder, const std::string& key,
                                       ClientCompileArgs* args) const {
  if (void* error = api_.entries()[kClientCompile](args)) return error;
  if (folder.empty()) return nullptr;
  ++compiled;
  const std::string file = FileName(folder, key);
  if (Store(folder, file, key, args->executable)) {
    ++stored;
    NoteUsed(file);
  }
  return nullptr;
}

void ExecutableCache::SetAppendedOptions(std::string bytes) {
  std::lock_guard<std::mutex> lock(options_mutex_);
  appended_options_ = std::move(bytes);
}

void* ExecutableCache::Compile(ClientCompileArgs* args) {
  if (args->struct_size < sizeof *args) return CompileWithOptions(args);
  std::string options;
  {
    std::lock_guard<std::mutex> lock(options_mutex_);
    if (!appended_options_.empty()) {
      options.assign(args->compile_options, args->compile_options_size).append(appended_options_);
    }
  }
  if (options.empty()) return CompileWithOptions(args);
  ClientCompileArgs changed = *args;
  changed.struct_size = sizeof changed;
  changed.compile_options = options.data();
  changed.compile_options_size = options.size();
  void* const error = CompileWithOptions(&changed);
  args->executable = changed.executable;
  return error;
}

void* ExecutableCache::CompileWithOptions(ClientCompileArgs* args) {
  const Entry compile = api_.entries()[kClientCompile];
  const std::string folder(Environment(kExecutableCacheVariable));
  if ((folder.empty() && !recorded_.InUse()) || args->struct_size < sizeof *args || args->program == nullptr) {
    return compile(args);
  }
  const std::string key = Key(*args);
  if (key.empty()) return compile(args);
  bool may_be_preloaded = false;
  {
    std::lock_guard<std::mutex> lock(used_mutex_);
    client_ = args->client;
    may_be_preloaded = client_ == preloading_client_;
  }
  if (void* ready = recorded_.Take(args->client, key)) {
    args->executable = ready;
    return nullptr;
  }
  if (!folder.empty()) {
    const std::string file = FileName(folder, key);
    void* const preloaded = may_be_preloaded ? preloaded_.Take(file, key) : nullptr;
    if (preloaded != nullptr) args->executable = preloaded;
    if (preloaded != nullptr || Load(file, key, args)) {
      ++loaded;
      NoteUsed(file);
      return nullptr;
    }
  }
  if (recorded_.Record(key, *args)) {
    // An error must be one of the plug-in's own. Every plug-in refuses a format that it does not know.
    Program program = *args->program;
    program.format = kRecordedFormat;
    program.format_size = sizeof kRecordedFormat - 1;
    ClientCompileArgs refused = *args;
    refused.program = &program;
    return compile(&refused);
  }
  return CompileAndStore(folder, key, args);
}

size_t ExecutableCache::StartRecorded(int threads) {
  const std::string folder(Environment(kExecutableCacheVariable));
  return recorded_.Start(threads, api_, [this, folder](const std::string& key, ClientCompileArgs* args) {
    return CompileAndStore(folder, key, args);
  });
}

}  // namespace xla_gpu::pjrt

extern "C" void xla_gpu_executable_cache_counts(int64_t counts[4]) {
  const xla_gpu::pjrt::ExecutableCacheCounts now = xla_gpu::pjrt::CountExecutables();
  counts[0] = now.loaded;
  counts[1] = now.compiled;
  counts[2] = now.stored;
  counts[3] = now.unusable;
}
