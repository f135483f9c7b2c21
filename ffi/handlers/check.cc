#include "ffi/handlers/check.h"

#include <algorithm>
#include <cstdio>

namespace xla_gpu {

void TextPart::Write(long long number) {
  text_ = {digits_, static_cast<size_t>(std::snprintf(digits_, sizeof digits_, "%lld", number))};
}
void TextPart::Write(unsigned long long number) {
  text_ = {digits_, static_cast<size_t>(std::snprintf(digits_, sizeof digits_, "%llu", number))};
}
void TextPart::Write(double number) {
  text_ = {digits_, static_cast<size_t>(std::snprintf(digits_, sizeof digits_, "%g", number))};
}

std::string Concatenate(std::initializer_list<TextPart> parts) {
  std::string text;
  for (const TextPart& part : parts) text += part.text();
  return text;
}

ffi::Error Mismatch(const char* op, const char* argument, std::string_view expected, std::string_view got) {
  return ffi::Error::InvalidArgument(StrCat(op, ": ", argument, ": expected ", expected, ", got ", got));
}

std::string ShapeText(ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

const char* DTypeText(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::DataType::F8E5M2:
      return "float8_e5m2";
    case ffi::DataType::F64:
      return "float64";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::S64:
      return "int64";
    case ffi::DataType::S8:
      return "int8";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::PRED:
      return "bool";
    default:
      return "another dtype";
  }
}

std::optional<DType> ToDType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F8E4M3FN:
      return DType::kF8E4M3FN;
    case ffi::DataType::F8E5M2:
      return DType::kF8E5M2;
    default:
      return std::nullopt;
  }
}

ffi::Error CheckDType(const char* op, const char* argument, const ffi::AnyBuffer& buffer, ffi::DataType expected) {
  if (buffer.element_type() == expected) return ffi::Error::Success();
  return Mismatch(op, argument, DTypeText(expected), DTypeText(buffer.element_type()));
}

ffi::Error GetComputeDType(const char* op, const char* argument, const ffi::AnyBuffer& buffer, DType* dtype) {
  std::optional<DType> known = ToDType(buffer.element_type());
  if (!known || IsFloat8(*known)) {
    return Mismatch(op, argument, "float32, float16 or bfloat16", DTypeText(buffer.element_type()));
  }
  *dtype = *known;
  return ffi::Error::Success();
}

ffi::Error CheckRank(const char* op, const char* argument, const ffi::AnyBuffer& buffer, size_t expected) {
  if (buffer.dimensions().size() == expected) return ffi::Error::Success();
  return Mismatch(op, argument, StrCat("rank ", expected),
                  StrCat("rank ", buffer.dimensions().size(), " (shape ", ShapeText(buffer.dimensions()), ")"));
}

ffi::Error CheckShape(const char* op, const char* argument, const ffi::AnyBuffer& buffer,
                      std::initializer_list<int64_t> expected) {
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, argument, buffer, expected.size()));
  size_t i = 0;
  for (int64_t dim : expected) {
    if (dim >= 0 && buffer.dimensions()[i] != dim) {
      return Mismatch(op, argument, StrCat("shape ", ShapeText({expected.begin(), expected.size()})),
                      StrCat("shape ", ShapeText(buffer.dimensions())));
    }
    ++i;
  }
  return ffi::Error::Success();
}

ffi::Error CheckSame(const char* op, const char* argument, const ffi::AnyBuffer& buffer, const char* other_name,
                     const ffi::AnyBuffer& other) {
  const ffi::Span<const int64_t> expected = other.dimensions(), got = buffer.dimensions();
  if (buffer.element_type() == other.element_type() &&
      std::equal(got.begin(), got.end(), expected.begin(), expected.end())) {
    return ffi::Error::Success();
  }
  return Mismatch(op, argument, StrCat(DTypeText(other.element_type()), " ", ShapeText(expected), " as ", other_name),
                  StrCat(DTypeText(buffer.element_type()), " ", ShapeText(got)));
}

ffi::Error CheckScratch(const char* op, const ffi::AnyBuffer& scratch, int64_t bytes) {
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "scratch", scratch, ffi::DataType::U8));
  if (const auto got = static_cast<int64_t>(scratch.size_bytes()); got < bytes) {
    return Mismatch(op, "scratch", StrCat("at least ", bytes, " bytes"), StrCat(got));
  }
  return ffi::Error::Success();
}

ffi::Error ToError(const Status& status) {
  switch (status.code()) {
    case Status::Code::kOk:
      return ffi::Error::Success();
    case Status::Code::kInvalidArgument:
      return ffi::Error::InvalidArgument(status.message());
    default:
      return ffi::Error::Internal(status.message());
  }
}

ffi::Error ExceptionError(const char* op, const char* what) { return ffi::Error::Internal(StrCat(op, ": ", what)); }

}  // namespace xla_gpu
