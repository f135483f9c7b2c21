// Fuzz target for eager calls: call frames, attributes, and the decoding and checking in the library's host
// handlers.
//
// Half of the inputs become calls of a handler that reads all that it is given, with every field taken from the input
// (that handler, or the one of a registered tvm-ffi function);
// the other half become calls of the library's own operators that are sound but for their contents and a few changes.
// A finding is a sanitizer's report, or an answer that xla_gpu.h excludes. An error is a valid answer.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "ffi/testing/fuzz/call.h"
#include "ffi/testing/fuzz/input.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = ::xla::ffi;

volatile uint64_t sum = 0;  // so that no read is left out

void Read(const void* data, size_t size) {
  for (size_t i = 0; i < size; ++i) sum = sum + static_cast<const uint8_t*>(data)[i];
}

void ReadBuffer(const XLA_FFI_Buffer& buffer) {
  constexpr auto kMaxBytes = static_cast<size_t>(xla_gpu::fuzz::kMaxBytes);
  size_t bytes = ffi::ByteWidth(static_cast<ffi::DataType>(buffer.dtype));
  for (int64_t i = 0; i < buffer.rank; ++i) {
    if (buffer.dims[i] < 0) std::abort();  // must not have come through
  }
  for (int64_t i = 0; i < buffer.rank; ++i) {
    if (buffer.dims[i] == 0) return;
    if (bytes > kMaxBytes || static_cast<size_t>(buffer.dims[i]) > kMaxBytes) return;  // has no memory
    bytes *= static_cast<size_t>(buffer.dims[i]);
  }
  if (bytes <= kMaxBytes) Read(buffer.data, bytes);
}

void ReadAttributes(const XLA_FFI_Attrs& attributes) {
  std::string_view before;
  for (int64_t i = 0; i < attributes.size; ++i) {
    const std::string_view name(attributes.names[i]->ptr, attributes.names[i]->len);
    if (i > 0 && name <= before) std::abort();  // XLA's decoding searches for names in order
    before = name;
    switch (attributes.types[i]) {
      case XLA_FFI_AttrType_SCALAR: {
        const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attributes.attrs[i]);
        Read(scalar->value, ffi::ByteWidth(static_cast<ffi::DataType>(scalar->dtype)));
        break;
      }
      case XLA_FFI_AttrType_ARRAY: {
        const auto* array = static_cast<const XLA_FFI_Array*>(attributes.attrs[i]);
        Read(array->data, array->size * ffi::ByteWidth(static_cast<ffi::DataType>(array->dtype)));
        break;
      }
      case XLA_FFI_AttrType_STRING: {
        const auto* string = static_cast<const XLA_FFI_ByteSpan*>(attributes.attrs[i]);
        Read(string->ptr, string->len);
        break;
      }
      case XLA_FFI_AttrType_DICTIONARY:
        ReadAttributes(*static_cast<const XLA_FFI_Attrs*>(attributes.attrs[i]));
        break;
      default:
        std::abort();
    }
  }
}

// XLA's own decoding, beside ours.
ffi::Error Decode(ffi::RemainingArgs args, ffi::RemainingRets, ffi::Dictionary attributes) {
  for (size_t i = 0; i < args.size(); ++i) {
    if (auto buffer = args.get<ffi::AnyBuffer>(i); buffer.has_value()) sum = sum + buffer->element_count();
    if (auto buffer = args.get<ffi::Buffer<ffi::F32>>(i); buffer.has_value()) sum = sum + buffer->dimensions().size();
  }
  for (std::string_view name : {"scale", "a", "nested", ""}) {
    if (auto value = attributes.get<float>(name); value.has_value()) sum = sum + (*value > 0);
    if (auto value = attributes.get<bool>(name); value.has_value()) sum = sum + (*value ? 1 : 2);
    if (auto value = attributes.get<int64_t>(name); value.has_value()) sum = sum + static_cast<uint64_t>(*value);
    if (auto value = attributes.get<std::string_view>(name); value.has_value()) Read(value->data(), value->size());
    if (auto value = attributes.get<ffi::Span<const int32_t>>(name); value.has_value()) {
      Read(value->begin(), value->size() * sizeof(int32_t));
    }
    if (auto value = attributes.get<ffi::Dictionary>(name); value.has_value()) sum = sum + value->size();
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(DecodeHandler, Decode, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_Error* ReadAll(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start == nullptr) {
    for (int64_t i = 0; i < frame->args.size; ++i) ReadBuffer(*static_cast<XLA_FFI_Buffer*>(frame->args.args[i]));
    for (int64_t i = 0; i < frame->rets.size; ++i) ReadBuffer(*static_cast<XLA_FFI_Buffer*>(frame->rets.rets[i]));
    ReadAttributes(frame->attrs);
  }
  return DecodeHandler(frame);
}

}  // namespace

uint64_t xla_gpu_fuzz_answered = 0;  // with a result, not an error; for main.cc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  xla_gpu::fuzz::Input input(data, size);
  xla_gpu::fuzz::Call call(&input);
  if (input.Once(2)) {
    call.Operator();
  } else {
    call.Anything();
  }
  xla_gpu_fuzz_answered += call.Run(input.Once(3) ? xla_gpu::fuzz::TvmFfiHandler() : ReadAll) ? 1 : 0;
  return 0;
}
