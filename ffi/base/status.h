// What kernels and launchers return: a code and a text, without XLA's types. Handlers turn it into an ffi::Error.
#ifndef XLA_GPU_BASE_STATUS_H_
#define XLA_GPU_BASE_STATUS_H_

#include <string>
#include <utility>

namespace xla_gpu {

class Status {
 public:
  enum class Code { kOk, kInvalidArgument, kInternal };

  Status() = default;
  static Status Ok() { return {}; }
  // The caller passed something that the operator excludes.
  static Status InvalidArgument(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
  // The library or the driver failed.
  static Status Internal(std::string message) { return {Code::kInternal, std::move(message)}; }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  Code code_ = Code::kOk;
  std::string message_;
};

}  // namespace xla_gpu

#endif  // XLA_GPU_BASE_STATUS_H_
