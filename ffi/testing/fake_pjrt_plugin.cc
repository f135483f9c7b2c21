// A PJRT plug-in without a device, for the tests of the adapter and of registration: it behaves like plug-ins of
// several versions do, and remembers what it was given. FAKE_PJRT chooses: "old" (PJRT API 0.50), "major" (1.112),
// "short" (a table that ends early), "null" (no table), "bare" (no extensions), "circle" (extensions in a circle),
// "unserialisable" (executables cannot be serialised), "refusing" (nor loaded), "failing" (what is computed cannot be
// read), "slow" (an execution takes 0.3 s), "mlir" (optimised programs in that format), "uncounted" (executables do not
// say how many results they have), "exhausted" (executions fail), "errorless" (a table without buffers that have an
// error), else a sound one. Its executables are texts, which return copies of their first
// arguments, as many results as fake_pjrt_set_results says; their optimised program is what fake_pjrt_set_program says.
// FAKE_KIND is the kind of its only device.
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ffi/runtime/pjrt_abi.h"
#include "ffi/testing/fake_pjrt.h"

namespace pjrt = xla_gpu::pjrt;

namespace fake_pjrt {

bool IsMode(const char* mode) {
  const char* variable = std::getenv("FAKE_PJRT");
  return variable != nullptr && std::strcmp(variable, mode) == 0;
}

void* MakeError(std::string text) { return new std::string(std::move(text)); }

size_t num_results = 0;
size_t NumResults() { return num_results; }

}  // namespace fake_pjrt

namespace {

using fake_pjrt::IsMode;
using fake_pjrt::MakeError;
using fake_pjrt::num_results;

constexpr size_t kEntries = 130;
constexpr size_t kOptionsSize = 112;      // PJRT_ExecuteOptions of PJRT API 0.78
constexpr size_t kMemoryStatsSize = 144;  // PJRT_Executable_GetCompiledMemoryStats_Args of 0.104

size_t options_size = 0;
std::string registered_target;

void* ErrorDestroy(void* args) {
  delete static_cast<std::string*>(static_cast<pjrt::ErrorDestroyArgs*>(args)->error);
  return nullptr;
}

void* ErrorMessage(void* untyped) {
  auto* args = static_cast<pjrt::ErrorMessageArgs*>(untyped);
  const auto* text = static_cast<const std::string*>(args->error);
  args->message = text->data();
  args->message_size = text->size();
  return nullptr;
}

void* ErrorGetCode(void* args) {
  static_cast<pjrt::ErrorGetCodeArgs*>(args)->code = pjrt::kFailedPrecondition;
  return nullptr;
}

void* PlatformName(void* untyped) {
  auto* args = static_cast<pjrt::ClientPlatformNameArgs*>(untyped);
  args->platform_name = "cuda";
  args->platform_name_size = 4;
  return nullptr;
}

void* CheckSize(const char* name, size_t expected, size_t got) {
  if (got >= expected) return nullptr;
  return MakeError(std::string("Unexpected ") + name + " size: expected " + std::to_string(expected) + ", got " +
                   std::to_string(got));
}

std::vector<const void*> executed;  // the memory of the last execution's arguments, null: of a buffer from the host
const void* DataOf(void* buffer);
void* executed_on = nullptr;  // the device that the last execution named
void* CopyOf(void* buffer);

void* Execute(void* untyped) {
  const auto* args = static_cast<pjrt::LoadedExecutableExecuteArgs*>(untyped);
  if (IsMode("slow")) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  executed.clear();
  executed_on = args->execute_device;
  for (size_t device = 0; device < args->num_devices; ++device) {
    for (size_t i = 0; i < args->num_args; ++i) executed.push_back(DataOf(args->argument_lists[device][i]));
  }
  const pjrt::Args* options = args->options;
  options_size = options->struct_size;
  if (void* error = CheckSize("PJRT_ExecuteOptions", kOptionsSize, options->struct_size)) return error;
  if (IsMode("exhausted")) return MakeError("the fake plug-in is out of memory");
  for (size_t device = 0; device < (num_results > 0 ? args->num_devices : 0); ++device) {
    for (size_t i = 0; i < num_results; ++i) {
      args->output_lists[device][i] = CopyOf(args->argument_lists[device][i]);
    }
  }
  return nullptr;
}

// Writes 7 into the first number of the statistics.
void* GetCompiledMemoryStats(void* untyped) {
  auto* args = static_cast<pjrt::Args*>(untyped);
  if (void* error = CheckSize("PJRT_Executable_GetCompiledMemoryStats_Args", kMemoryStatsSize, args->struct_size)) {
    return error;
  }
  const int64_t size = 7;
  std::memcpy(reinterpret_cast<char*>(args) + 24, &size, sizeof size);
  return nullptr;
}

// ---- Buffers, of which a "device" is the number 1 and a "memory" the number 2 ----

struct FakeBuffer {
  void* data = nullptr;  // null: made from host memory
  int32_t type = 0;
  intptr_t stream = 0;
  int64_t references = 0;
  pjrt::CreateViewOfDeviceBufferArgs view = {};
  std::string contents = {};  // of a vector of 32-bit numbers that was made from host memory
  void* device = nullptr;
};
FakeBuffer* last_view = nullptr;
const void* DataOf(void* buffer) { return static_cast<FakeBuffer*>(buffer)->data; }
int64_t host_buffers = 0, views = 0, destroyed_buffers = 0, waits = 0;

void* BufferFromHostBuffer(void* untyped) {
  auto* args = static_cast<pjrt::BufferFromHostBufferArgs*>(untyped);
  if (void* error = CheckSize("PJRT_Client_BufferFromHostBuffer_Args", sizeof *args, args->struct_size)) return error;
  ++host_buffers;
  auto* buffer = new FakeBuffer;
  if (args->num_dims == 1 && args->data != nullptr && num_results > 0) {
    buffer->contents.assign(static_cast<const char*>(args->data), static_cast<size_t>(args->dims[0]) * 4);
  }
  if (num_results > 0) buffer->device = args->device;
  args->buffer = buffer;
  args->done_with_host_buffer = nullptr;
  return nullptr;
}

void* CreateViewOfDeviceBuffer(void* untyped) {
  auto* args = static_cast<pjrt::CreateViewOfDeviceBufferArgs*>(untyped);
  if (args->on_delete_callback == nullptr) return MakeError("a view without on_delete_callback ends the process");
  if (args->num_dims == 7) return MakeError("the fake plug-in refuses views of rank 7");
  ++views;
  last_view = new FakeBuffer{args->device_buffer_ptr, args->element_type, args->stream, 0, *args};
  args->buffer = last_view;
  return nullptr;
}

FakeBuffer* BufferOf(void* args) { return static_cast<FakeBuffer*>(static_cast<pjrt::BufferArgs*>(args)->buffer); }

void* BufferDestroy(void* args) {
  FakeBuffer* const buffer = BufferOf(args);
  ++destroyed_buffers;
  if (buffer->data != nullptr) buffer->view.on_delete_callback(buffer->data, buffer->view.on_delete_callback_arg);
  if (buffer == last_view) {  // tests read its numbers later
    static FakeBuffer destroyed_view;
    destroyed_view = *buffer;
    last_view = &destroyed_view;
  }
  delete buffer;
  return nullptr;
}

void* CopyOf(void* buffer) {
  auto* copy = new FakeBuffer;
  copy->contents = static_cast<FakeBuffer*>(buffer)->contents;
  copy->device = static_cast<FakeBuffer*>(buffer)->device;
  return copy;
}

void* BufferToHostBuffer(void* untyped) {
  auto* args = static_cast<pjrt::BufferToHostBufferArgs*>(untyped);
  const std::string& contents = static_cast<FakeBuffer*>(args->buffer)->contents;
  if (args->size != contents.size()) return MakeError("the fake plug-in's buffer has another size");
  std::memcpy(args->data, contents.data(), contents.size());
  args->event = &num_results;
  return nullptr;
}

// The error is what the buffer's contents say.
void* CreateErrorBuffer(void* untyped) {
  auto* args = static_cast<pjrt::CreateErrorBufferArgs*>(untyped);
  if (args->memory != reinterpret_cast<void*>(2) || args->client == nullptr) return MakeError("an unknown memory");
  auto* buffer = new FakeBuffer;
  buffer->type = args->type;
  buffer->contents.assign(args->error_message, args->error_message_size);
  args->buffer = buffer;
  return nullptr;
}

void* Unimplemented(void*) { return MakeError("the fake plug-in does nothing else"); }

// The only events are those of BufferToHostBuffer.
bool IsTransfer(void* args) { return static_cast<pjrt::EventArgs*>(args)->event == &num_results; }
void* EventAwait(void* args) {
  if (!IsTransfer(args)) return Unimplemented(args);
  return IsMode("failing") ? MakeError("the fake plug-in computed nothing") : nullptr;
}
void* EventDestroy(void* args) { return IsTransfer(args) ? nullptr : Unimplemented(args); }

void* BufferDevice(void* args) {
  void* const device = BufferOf(args)->device;
  static_cast<pjrt::BufferArgs*>(args)->out = device != nullptr ? device : reinterpret_cast<void*>(1);
  return nullptr;
}

template <intptr_t kOut>
void* BufferNumber(void* args) {
  static_cast<pjrt::BufferArgs*>(args)->out = reinterpret_cast<void*>(kOut);
  return nullptr;
}

void* BufferPointer(void* args) {
  static_cast<pjrt::BufferArgs*>(args)->out = BufferOf(args)->data;
  return nullptr;
}

template <int kStep>
void* CountReference(void* args) {
  BufferOf(args)->references += kStep;
  return nullptr;
}

void* GetStream(pjrt::StreamForReadyEventsArgs* args) {
  args->stream = reinterpret_cast<intptr_t>(args->device) == 1 ? 77 : 0;
  return nullptr;
}

void* WaitForBuffer(pjrt::WaitForBufferArgs*) {
  ++waits;
  return nullptr;
}

void* RegisterCustomCall(pjrt::GpuRegisterCustomCallArgs* args) {
  registered_target.assign(args->function_name, args->function_name_size);
  if (registered_target == "refuse_me") return MakeError("the fake plug-in refuses this name");
  return nullptr;
}

struct Table {
  pjrt::Api api;
  pjrt::Entry entries[kEntries];
};

}  // namespace

extern "C" __attribute__((visibility("default"))) size_t fake_pjrt_options_size() { return options_size; }
extern "C" __attribute__((visibility("default"))) const char* fake_pjrt_registered_target() {
  return registered_target.c_str();
}

extern "C" __attribute__((visibility("default"))) void fake_pjrt_set_results(size_t results) {
  fake_pjrt::num_results = results;
}

extern "C" __attribute__((visibility("default"))) const void* fake_pjrt_executed_on() { return executed_on; }

// The memory of the last execution's arguments; returns their number, at most `capacity`.
extern "C" __attribute__((visibility("default"))) size_t fake_pjrt_executed(const void** data, size_t capacity) {
  const size_t count = executed.size() < capacity ? executed.size() : capacity;
  for (size_t i = 0; i < count; ++i) data[i] = executed[i];
  return count;
}

// What happened to buffers: made from host memory, destroyed, waited for; the last view's stream and references; views
// that were made.
extern "C" __attribute__((visibility("default"))) void fake_pjrt_buffers(int64_t counts[6]) {
  counts[0] = host_buffers;
  counts[1] = destroyed_buffers;
  counts[2] = waits;
  counts[3] = last_view != nullptr ? last_view->stream : -1;
  counts[4] = last_view != nullptr ? last_view->references : -1;
  counts[5] = views;
}

extern "C" __attribute__((visibility("default"))) const void* GetPjrtApi() {
  static Table table = {};
  static pjrt::StreamExtension stream = {{sizeof stream, pjrt::kStream, nullptr}, GetStream, WaitForBuffer};
  pjrt::Extension& other = stream.base;
  static pjrt::GpuCustomCallExtension custom_call = {{sizeof custom_call, pjrt::kGpuCustomCall, nullptr},
                                                     RegisterCustomCall};
  if (IsMode("null")) return nullptr;
  table.api.struct_size = IsMode("short") ? sizeof(pjrt::Api) + 20 * sizeof(pjrt::Entry) : sizeof table;
  table.api.version = {sizeof(pjrt::Version), nullptr, IsMode("major") ? 1 : 0, IsMode("old") ? 50 : 112};
  table.api.extension_start = IsMode("bare") ? nullptr : &other;
  other.next = IsMode("circle") ? &other : &custom_call.base;
  for (pjrt::Entry& entry : table.entries) entry = Unimplemented;
  fake_pjrt::SetExecutableEntries(table.entries);
  table.entries[pjrt::kErrorDestroy] = ErrorDestroy;
  table.entries[pjrt::kErrorMessage] = ErrorMessage;
  table.entries[pjrt::kErrorGetCode] = ErrorGetCode;
  table.entries[pjrt::kClientPlatformName] = PlatformName;
  table.entries[pjrt::kLoadedExecutableExecute] = Execute;
  table.entries[pjrt::kExecutableGetCompiledMemoryStats] = GetCompiledMemoryStats;
  table.entries[pjrt::kClientBufferFromHostBuffer] = BufferFromHostBuffer;
  table.entries[pjrt::kClientCreateViewOfDeviceBuffer] = CreateViewOfDeviceBuffer;
  table.entries[pjrt::kBufferDestroy] = BufferDestroy;
  table.entries[pjrt::kBufferDevice] = BufferDevice;
  table.entries[pjrt::kBufferToHostBuffer] = BufferToHostBuffer;
  table.entries[pjrt::kClientCreateErrorBuffer] = IsMode("errorless") ? nullptr : CreateErrorBuffer;
  table.entries[pjrt::kDeviceDefaultMemory] = BufferNumber<2>;
  table.entries[pjrt::kEventAwait] = EventAwait;
  table.entries[pjrt::kEventDestroy] = EventDestroy;
  table.entries[pjrt::kBufferUnsafePointer] = BufferNumber<0x1234>;
  table.entries[pjrt::kBufferIncreaseExternalReferenceCount] = CountReference<1>;
  table.entries[pjrt::kBufferDecreaseExternalReferenceCount] = CountReference<-1>;
  table.entries[pjrt::kBufferOpaqueDeviceMemoryDataPointer] = BufferPointer;
  return &table;
}
