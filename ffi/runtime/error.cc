#include "ffi/runtime/error.h"

namespace xla_gpu {

const char* Report(const Error& error, int32_t* code) noexcept {
  if (code != nullptr) *code = error.code;
  if (error.ok()) return nullptr;
  if (error.message.empty()) return "out of memory";
  thread_local std::string text;
  try {
    text = error.message;
  } catch (...) {
    return "out of memory";
  }
  return text.c_str();
}

}  // namespace xla_gpu
