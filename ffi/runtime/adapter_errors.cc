#include "ffi/runtime/adapter_errors.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace xla_gpu::pjrt {
namespace {

// Of the plug-in, which the adapter's stand in front of; set once, before an entry can be called.
Entry error_destroy = nullptr, error_message = nullptr, error_get_code = nullptr, error_for_each_payload = nullptr;

constexpr char kAdapterName[] = "xla_gpu: ";

std::atomic<size_t> num_errors{0};  // that the client has
std::mutex errors_mutex;
std::unordered_map<const void*, std::unique_ptr<const Error>>& Errors() {
  static auto* const errors = new std::unordered_map<const void*, std::unique_ptr<const Error>>;
  return *errors;
}

// Where there is no memory for another one. Never destroyed.
const Error& NoMemoryError() {
  static const auto* const error = new Error{XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "out of memory"};
  return *error;
}

// The adapter's error at this address; null: it is one of the plug-in.
const Error* FindError(const void* error) {
  if (error == &NoMemoryError()) return &NoMemoryError();
  if (num_errors.load(std::memory_order_acquire) == 0) return nullptr;
  std::lock_guard<std::mutex> lock(errors_mutex);
  const auto found = Errors().find(error);
  return found == Errors().end() ? nullptr : found->second.get();
}

void* DestroyError(void* args) {
  void* const given = static_cast<ErrorDestroyArgs*>(args)->error;
  const Error* const error = FindError(given);
  if (error == nullptr) return error_destroy(args);
  if (error == &NoMemoryError()) return nullptr;
  std::lock_guard<std::mutex> lock(errors_mutex);
  Errors().erase(given);
  num_errors.store(Errors().size(), std::memory_order_release);
  return nullptr;
}

void* ErrorText(void* untyped) {
  auto* args = static_cast<ErrorMessageArgs*>(untyped);
  const Error* const error = FindError(args->error);
  if (error == nullptr) return error_message(args);
  args->message = error->message.data();
  args->message_size = error->message.size();
  return nullptr;
}

void* ErrorCode(void* untyped) {
  auto* args = static_cast<ErrorGetCodeArgs*>(untyped);
  const Error* const error = FindError(args->error);
  if (error == nullptr) return error_get_code(args);
  args->code = static_cast<int32_t>(error->code);  // both are those of absl::Status
  return nullptr;
}

void* ErrorPayloads(void* args) {
  return FindError(static_cast<ErrorMessageArgs*>(args)->error) != nullptr ? nullptr : error_for_each_payload(args);
}

}  // namespace

void AdapterErrorsUse(Entry* entries, size_t num_entries) {
  NoMemoryError();
  const auto wrap = [&](size_t entry, Entry* behind, Entry front) {
    if (entry >= num_entries || entries[entry] == nullptr) return;
    *behind = entries[entry];
    entries[entry] = front;
  };
  wrap(kErrorDestroy, &error_destroy, DestroyError);
  wrap(kErrorMessage, &error_message, ErrorText);
  wrap(kErrorGetCode, &error_get_code, ErrorCode);
  wrap(kErrorForEachPayload, &error_for_each_payload, ErrorPayloads);
}

void* RefusedBy(const Error& error) {
  const void* made = &NoMemoryError();
  Guarded("an error", [&]() -> Error {
    const bool named =
        error.message.compare(0, sizeof kAdapterName - 1, kAdapterName) == 0;  // one that is told once more
    auto own = std::make_unique<const Error>(Error{error.code, (named ? "" : kAdapterName) + error.message});
    const void* const address = own.get();
    std::lock_guard<std::mutex> lock(errors_mutex);
    Errors().emplace(address, std::move(own));
    num_errors.store(Errors().size(), std::memory_order_release);
    made = address;
    return {};
  });
  return const_cast<void*>(made);
}

Error TakeAnyError(void* error) {
  ErrorGetCodeArgs code = {};
  code.struct_size = sizeof code;
  code.error = error;
  if (error_get_code != nullptr) ErrorCode(&code);
  ErrorMessageArgs text = {};
  text.struct_size = sizeof text;
  text.error = error;
  ErrorText(&text);
  Error taken;
  Guarded("an error", [&]() -> Error {
    if (text.message != nullptr) taken.message.assign(text.message, text.message_size);
    return {};
  });
  taken.code = code.code > 0 ? static_cast<XLA_FFI_Error_Code>(code.code) : XLA_FFI_Error_Code_INTERNAL;
  ErrorDestroyArgs destroy = {};
  destroy.struct_size = sizeof destroy;
  destroy.error = error;
  DestroyError(&destroy);
  return taken;
}

}  // namespace xla_gpu::pjrt
