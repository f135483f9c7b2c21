// How functions of the runtime fail, and how a failure crosses the C interface.
#ifndef XLA_GPU_RUNTIME_ERROR_H_
#define XLA_GPU_RUNTIME_ERROR_H_

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace xla_gpu {

struct Error {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;

  bool ok() const { return code == XLA_FFI_Error_Code_OK; }

  static Error InvalidArgument(std::string message) {
    return {XLA_FFI_Error_Code_INVALID_ARGUMENT, std::move(message)};
  }
  // The other side is there, but is not what we need: a wrong version, a missing extension.
  static Error FailedPrecondition(std::string message) {
    return {XLA_FFI_Error_Code_FAILED_PRECONDITION, std::move(message)};
  }
  static Error Unimplemented(std::string message) { return {XLA_FFI_Error_Code_UNIMPLEMENTED, std::move(message)}; }
  static Error Internal(std::string message) { return {XLA_FFI_Error_Code_INTERNAL, std::move(message)}; }
};

// NULL where `error` is ok, else its text, kept for the calling thread until its next failure. Writes the code to
// `code` unless that is null.
const char* Report(const Error& error, int32_t* code = nullptr) noexcept;

// Calls `body` and turns what it throws into an Error: nothing may be thrown into C, and handlers may be third-party
// code. `what` names the body in the text.
template <typename Body>
Error Guarded(const char* what, Body&& body) noexcept {
  try {
    try {
      return body();
    } catch (const std::bad_alloc&) {
      return {XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "out of memory"};
    } catch (const std::exception& e) {
      return Error::Internal(std::string(what) + " threw a C++ exception: " + e.what());
    } catch (...) {
      return Error::Internal(std::string(what) + " threw a C++ exception of an unknown type");
    }
  } catch (...) {  // no memory for the text either; this one needs none
    return {XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, {}};
  }
}

// For texts: `0.1`.
inline std::string VersionText(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

}  // namespace xla_gpu

#endif  // XLA_GPU_RUNTIME_ERROR_H_
