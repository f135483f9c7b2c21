// Checks of operands, results and attributes, for handlers. Every error names the operator, the argument, what was
// expected and what was given.
#ifndef XLA_GPU_HANDLERS_CHECK_H_
#define XLA_GPU_HANDLERS_CHECK_H_

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "ffi/base/dtype.h"
#include "ffi/base/status.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

#define XLA_GPU_RETURN_IF_ERROR(expr)                                                               \
  do {                                                                                              \
    if (::xla::ffi::Error xla_gpu_error_ = (expr); xla_gpu_error_.failure()) return xla_gpu_error_; \
  } while (false)

namespace xla_gpu {

namespace ffi = ::xla::ffi;

// A piece of an error's text. It owns no memory and needs no destructor, and numbers are written out of line: texts are
// made in many places, and seldom.
class TextPart {
 public:
  TextPart(std::string_view text) : text_(text) {}
  TextPart(const char* text) : text_(text) {}
  TextPart(const std::string& text) : text_(text) {}
  template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
  TextPart(T number) {
    Write(Widest<T>{number});
  }
  TextPart(const TextPart&) = delete;  // text_ may be in digits_
  TextPart& operator=(const TextPart&) = delete;

  std::string_view text() const { return text_; }

 private:
  template <typename T>
  using Widest = std::conditional_t<std::is_floating_point_v<T>, double,
                                    std::conditional_t<std::is_signed_v<T>, long long, unsigned long long>>;
  void Write(long long number);
  void Write(unsigned long long number);
  void Write(double number);

  char digits_[32];
  std::string_view text_;
};

std::string Concatenate(std::initializer_list<TextPart> parts);

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  return Concatenate({TextPart(parts)...});
}

// "paged_attention: query: expected rank 3, got rank 2"
ffi::Error Mismatch(const char* op, const char* argument, std::string_view expected, std::string_view got);

std::string ShapeText(ffi::Span<const int64_t> dims);

const char* DTypeText(ffi::DataType dtype);

// The only switch from XLA's dtypes to ours.
std::optional<DType> ToDType(ffi::DataType dtype);

// The way back, of a dtype that is computed in.
constexpr ffi::DataType FloatType(DType dtype) {
  return dtype == DType::kF32 ? ffi::DataType::F32 : dtype == DType::kF16 ? ffi::DataType::F16 : ffi::DataType::BF16;
}

ffi::Error CheckDType(const char* op, const char* argument, const ffi::AnyBuffer& buffer, ffi::DataType expected);

// Reads the dtype in which an operator computes.
ffi::Error GetComputeDType(const char* op, const char* argument, const ffi::AnyBuffer& buffer, DType* dtype);

ffi::Error CheckRank(const char* op, const char* argument, const ffi::AnyBuffer& buffer, size_t expected);

// `expected` may hold -1 for "any".
ffi::Error CheckShape(const char* op, const char* argument, const ffi::AnyBuffer& buffer,
                      std::initializer_list<int64_t> expected);

// Same dtype and shape as another argument.
ffi::Error CheckSame(const char* op, const char* argument, const ffi::AnyBuffer& buffer, const char* other_name,
                     const ffi::AnyBuffer& other);

// A uint8 array of at least `bytes`.
ffi::Error CheckScratch(const char* op, const ffi::AnyBuffer& scratch, int64_t bytes);

ffi::Error ToError(const Status& status);

ffi::Error ExceptionError(const char* op, const char* what);

// Runs `body`, which returns an ffi::Error, and turns an exception into one. Nothing in XLA catches exceptions: one
// that leaves a handler ends the process.
template <typename Body>
ffi::Error NoThrow(const char* op, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const std::exception& error) {
    return ExceptionError(op, error.what());
  } catch (...) {
    return ExceptionError(op, "an exception of an unknown type");
  }
}

}  // namespace xla_gpu

#endif  // XLA_GPU_HANDLERS_CHECK_H_
