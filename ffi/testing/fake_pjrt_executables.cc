// The fake PJRT plug-in's executables, which are texts. FAKE_KIND is the kind of its only device. The client whose
// address is 1 is the usual one.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/pjrt_abi_executables.h"
#include "ffi/testing/fake_pjrt.h"

namespace fake_pjrt {
namespace {

namespace pjrt = xla_gpu::pjrt;

std::atomic<int> compilations{0};
std::atomic<int> live_executables{0};     // that are not loaded ones
std::atomic<int> loads{0}, destroyed{0};  // of loaded ones

void* PlatformVersion(void* untyped) {
  auto* args = static_cast<pjrt::ClientPlatformVersionArgs*>(untyped);
  args->platform_version = "fake 1";
  args->platform_version_size = 6;
  return nullptr;
}

void* AddressableDevices(void* untyped) {
  static void* device = nullptr;
  auto* args = static_cast<pjrt::ClientAddressableDevicesArgs*>(untyped);
  args->devices = &device;
  args->num_devices = 1;
  return nullptr;
}

void* GetDescription(void*) { return nullptr; }

void* DeviceKind(void* untyped) {
  auto* args = static_cast<pjrt::DeviceDescriptionKindArgs*>(untyped);
  const char* kind = std::getenv("FAKE_KIND");
  args->kind = kind != nullptr ? kind : "fake GPU";
  args->kind_size = std::strlen(args->kind);
  return nullptr;
}

void* Compile(void* untyped) {
  auto* args = static_cast<pjrt::ClientCompileArgs*>(untyped);
  const std::string code(args->program->code, args->program->code_size);
  if (std::string(args->program->format, args->program->format_size) != "hlo") return MakeError("unknown format");
  if (code == "wrong") return MakeError("the fake plug-in cannot compile this");
  ++compilations;
  args->executable = new std::string("compiled " + code);
  return nullptr;
}

void* GetExecutable(void* untyped) {
  auto* args = static_cast<pjrt::LoadedExecutableGetExecutableArgs*>(untyped);
  if (args->loaded_executable == nullptr) return MakeError("no executable");
  args->executable = new std::string(*static_cast<std::string*>(args->loaded_executable));
  ++live_executables;
  return nullptr;
}

void* DestroyExecutable(void* untyped) {
  delete static_cast<std::string*>(static_cast<pjrt::ExecutableDestroyArgs*>(untyped)->executable);
  --live_executables;
  return nullptr;
}

void* NumOutputs(void* untyped) {
  if (IsMode("uncounted")) return MakeError("the fake plug-in counts no results");
  static_cast<pjrt::ExecutableNumOutputsArgs*>(untyped)->num_outputs = NumResults();
  return nullptr;
}

// Results are vectors of two 32-bit integers; of an executable with "float" in its text, of floats.
void* OutputElementTypes(void* untyped) {
  thread_local std::vector<int32_t> types;
  auto* args = static_cast<pjrt::ExecutableOutputElementTypesArgs*>(untyped);
  const bool floats = static_cast<std::string*>(args->executable)->find("float") != std::string::npos;
  types.assign(NumResults(), floats ? 11 : 4);  // PJRT_Buffer_Type
  args->types = types.data();
  args->num_types = types.size();
  return nullptr;
}

void* OutputDimensions(void* untyped) {
  thread_local std::vector<int64_t> dims;
  thread_local std::vector<size_t> num_dims;
  auto* args = static_cast<pjrt::ExecutableOutputDimensionsArgs*>(untyped);
  dims.assign(NumResults(), 2);
  num_dims.assign(NumResults(), 1);
  args->dims = dims.data();
  args->num_dims = num_dims.data();
  args->num_outputs = num_dims.size();
  return nullptr;
}

void* LoadedAddressableDevices(void* untyped) {
  static void* devices[] = {reinterpret_cast<void*>(1), reinterpret_cast<void*>(2)};
  auto* args = static_cast<pjrt::LoadedExecutableAddressableDevicesArgs*>(untyped);
  args->devices = devices;
  args->num_devices = 2;
  return nullptr;
}

std::string optimized_program;

void* OptimizedProgram(void* untyped) {
  pjrt::Program* const program = static_cast<pjrt::ExecutableOptimizedProgramArgs*>(untyped)->program;
  program->format = IsMode("mlir") ? "mlir" : "hlo_with_config";
  program->format_size = std::strlen(program->format);
  if (program->code == nullptr) {
    program->code_size = optimized_program.size();
    return nullptr;
  }
  if (program->code_size < optimized_program.size()) return MakeError("too small a buffer for the program");
  std::memcpy(const_cast<char*>(program->code), optimized_program.data(), optimized_program.size());
  return nullptr;
}

void* DestroyLoaded(void* untyped) {
  ++destroyed;
  delete static_cast<std::string*>(static_cast<pjrt::ExecutableDestroyArgs*>(untyped)->executable);
  return nullptr;
}

void* Serialize(void* untyped) {
  if (IsMode("unserialisable")) return MakeError("the fake plug-in serialises nothing");
  auto* args = static_cast<pjrt::ExecutableSerializeArgs*>(untyped);
  auto* text = new std::string("stored " + *static_cast<const std::string*>(args->executable));
  ++live_executables;
  args->bytes = text->data();
  args->num_bytes = text->size();
  args->owner = text;
  args->deleter = [](void* owner) {
    delete static_cast<std::string*>(owner);
    --live_executables;
  };
  return nullptr;
}

void* DeserializeAndLoad(void* untyped) {
  auto* args = static_cast<pjrt::DeserializeAndLoadArgs*>(untyped);
  if (IsMode("refusing")) return MakeError("the fake plug-in loads nothing");
  ++loads;
  std::string text(args->bytes, args->num_bytes);
  text += reinterpret_cast<intptr_t>(args->client) == 1 ? " loaded" : " loaded for another client";
  args->loaded_executable = new std::string(std::move(text));
  return nullptr;
}

}  // namespace

void SetExecutableEntries(pjrt::Entry* entries) {
  entries[pjrt::kClientPlatformVersion] = PlatformVersion;
  entries[pjrt::kClientAddressableDevices] = AddressableDevices;
  entries[pjrt::kDeviceGetDescription] = GetDescription;
  entries[pjrt::kDeviceDescriptionKind] = DeviceKind;
  entries[pjrt::kClientCompile] = Compile;
  entries[pjrt::kLoadedExecutableGetExecutable] = GetExecutable;
  entries[pjrt::kExecutableDestroy] = DestroyExecutable;
  entries[pjrt::kLoadedExecutableDestroy] = DestroyLoaded;
  entries[pjrt::kExecutableNumOutputs] = NumOutputs;
  entries[pjrt::kExecutableOptimizedProgram] = OptimizedProgram;
  entries[pjrt::kExecutableOutputElementTypes] = OutputElementTypes;
  entries[pjrt::kExecutableOutputDimensions] = OutputDimensions;
  entries[pjrt::kLoadedExecutableAddressableDevices] = LoadedAddressableDevices;
  entries[pjrt::kExecutableSerialize] = Serialize;
  entries[pjrt::kExecutableDeserializeAndLoad] = DeserializeAndLoad;
}

}  // namespace fake_pjrt

#define FAKE_PJRT_EXPORT extern "C" __attribute__((visibility("default")))

FAKE_PJRT_EXPORT int fake_pjrt_compilations() { return fake_pjrt::compilations; }
FAKE_PJRT_EXPORT int fake_pjrt_live_executables() { return fake_pjrt::live_executables; }
FAKE_PJRT_EXPORT int fake_pjrt_loads() { return fake_pjrt::loads; }
FAKE_PJRT_EXPORT int fake_pjrt_destroyed() { return fake_pjrt::destroyed; }
FAKE_PJRT_EXPORT const char* fake_pjrt_executable_text(const void* executable) {
  return static_cast<const std::string*>(executable)->c_str();
}
FAKE_PJRT_EXPORT void fake_pjrt_set_program(const char* bytes, size_t size) {
  fake_pjrt::optimized_program.assign(bytes, size);
}
