// Third-party handlers for the tests of register_ffi_target and ffi_call. Each shows one thing. They are written
// as a user would write them, with XLA's headers and nothing of ours.
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// ---- scale: one operand, one result, one typed attribute ----
ffi::Error Scale(ffi::Buffer<ffi::F32> a, ffi::Result<ffi::Buffer<ffi::F32>> out, float factor) {
  if (a.element_count() != out->element_count()) return ffi::Error::InvalidArgument("test_scale: sizes differ");
  for (size_t i = 0; i < a.element_count(); ++i) out->typed_data()[i] = a.typed_data()[i] * factor;
  return ffi::Error::Success();
}

// Another function, for registrations of one name twice.
ffi::Error Negate(ffi::Buffer<ffi::F32> a, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  for (size_t i = 0; i < a.element_count(); ++i) out->typed_data()[i] = -a.typed_data()[i];
  return ffi::Error::Success();
}

// ---- two_results: of different shapes and dtypes ----
ffi::Error TwoResults(ffi::Buffer<ffi::F32> a, ffi::Result<ffi::Buffer<ffi::F32>> plus_one,
                      ffi::Result<ffi::Buffer<ffi::S32>> count) {
  for (size_t i = 0; i < a.element_count(); ++i) plus_one->typed_data()[i] = a.typed_data()[i] + 1;
  count->typed_data()[0] = static_cast<int32_t>(a.element_count());
  return ffi::Error::Success();
}

// ---- raw_copy: the operand's bytes in the order in which they lie in memory ----
ffi::Error RawCopy(ffi::AnyBuffer a, ffi::Result<ffi::AnyBuffer> out) {
  if (a.size_bytes() != out->size_bytes()) return ffi::Error::InvalidArgument("test_raw_copy: sizes differ");
  std::memcpy(out->untyped_data(), a.untyped_data(), a.size_bytes());
  return ffi::Error::Success();
}

// ---- increment: in place, or an error ----
ffi::Error Increment(ffi::Buffer<ffi::F32> a, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  if (a.untyped_data() != out->untyped_data()) return ffi::Error::Internal("test_increment: the operand was copied");
  for (size_t i = 0; i < a.element_count(); ++i) out->typed_data()[i] += 1;
  return ffi::Error::Success();
}

// ---- tick: counts its calls ----
std::atomic<int64_t> ticks{0};

ffi::Error Tick(ffi::Buffer<ffi::F32> a, ffi::Result<ffi::Buffer<ffi::F32>> out) {
  ++ticks;
  std::memcpy(out->untyped_data(), a.untyped_data(), a.size_bytes());
  return ffi::Error::Success();
}

// ---- fail: an error of any code ----
ffi::Error Fail(ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>, int64_t code, std::string_view message) {
  return ffi::Error(static_cast<ffi::ErrorCode>(code), std::string(message));
}

// ---- staged: counts each stage's calls, and checks that all see the attribute ----
std::atomic<int64_t> stage_calls[4];

ffi::Error Instantiate(int64_t key) {
  ++stage_calls[0];
  return key == 7 ? ffi::Error::Success() : ffi::Error::InvalidArgument("test_staged: key is not 7");
}

// NOTE: a runtime passes buffers to these two as well as to the execution, with addresses that must not be read yet.
ffi::Error Prepare(ffi::RemainingArgs, ffi::RemainingRets, int64_t) {
  ++stage_calls[1];
  return ffi::Error::Success();
}

ffi::Error Initialize(ffi::RemainingArgs, ffi::RemainingRets, int64_t) {
  ++stage_calls[2];
  return ffi::Error::Success();
}

ffi::Error Execute(ffi::Buffer<ffi::F32> a, ffi::Result<ffi::Buffer<ffi::F32>> out, int64_t) {
  ++stage_calls[3];
  std::memcpy(out->untyped_data(), a.untyped_data(), a.size_bytes());
  return ffi::Error::Success();
}

// ---- On CUDA: fills and copies on XLA's stream, through the driver, so that these tests need no CUDA compiler ----
using Stream = void*;  // CUstream

template <typename Function>
Function Driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

ffi::Error FillCuda(Stream stream, ffi::AnyBuffer, ffi::Result<ffi::Buffer<ffi::F32>> out, float value) {
  const auto fill = Driver<int (*)(uint64_t, uint32_t, size_t, Stream)>("cuMemsetD32Async");
  if (fill == nullptr) return ffi::Error::Internal("test_fill: no CUDA driver");
  uint32_t pattern;
  std::memcpy(&pattern, &value, sizeof pattern);
  const int code = fill(reinterpret_cast<uint64_t>(out->untyped_data()), pattern, out->element_count(), stream);
  return code == 0 ? ffi::Error::Success() : ffi::Error::Internal("test_fill: CUDA error " + std::to_string(code));
}

ffi::Error RawCopyCuda(Stream stream, ffi::AnyBuffer a, ffi::Result<ffi::AnyBuffer> out) {
  if (a.size_bytes() != out->size_bytes()) return ffi::Error::InvalidArgument("test_raw_copy: sizes differ");
  if (a.untyped_data() == out->untyped_data()) return ffi::Error::Success();
  const auto copy = Driver<int (*)(uint64_t, uint64_t, size_t, Stream)>("cuMemcpyDtoDAsync_v2");
  if (copy == nullptr) return ffi::Error::Internal("test_raw_copy: no CUDA driver");
  const int code = copy(reinterpret_cast<uint64_t>(out->untyped_data()), reinterpret_cast<uint64_t>(a.untyped_data()),
                        a.size_bytes(), stream);
  return code == 0 ? ffi::Error::Success() : ffi::Error::Internal("test_raw_copy: CUDA error " + std::to_string(code));
}

// ---- describe: the attributes exactly as they arrive ----
void Hex(const void* data, size_t size, std::string* text) {
  char digits[3];
  for (size_t i = 0; i < size; ++i) {
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(data)[i]);
    *text += digits;
  }
}

size_t SizeOf(XLA_FFI_DataType dtype) { return ffi::ByteWidth(static_cast<ffi::DataType>(dtype)); }

// "name=scalar:11:0000803f name=array:4:01000000,02000000 name=string:666f6f name={…}", dtypes by XLA_FFI_DataType.
void Describe(const XLA_FFI_Attrs& attributes, std::string* text) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    if (i > 0) *text += ' ';
    text->append(attributes.names[i]->ptr, attributes.names[i]->len);
    *text += '=';
    const void* attribute = attributes.attrs[i];
    switch (attributes.types[i]) {
      case XLA_FFI_AttrType_SCALAR: {
        const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attribute);
        *text += "scalar:" + std::to_string(scalar->dtype) + ":";
        Hex(scalar->value, SizeOf(scalar->dtype), text);
        break;
      }
      case XLA_FFI_AttrType_ARRAY: {
        const auto* array = static_cast<const XLA_FFI_Array*>(attribute);
        *text += "array:" + std::to_string(array->dtype) + ":" + std::to_string(array->size) + ":";
        Hex(array->data, array->size * SizeOf(array->dtype), text);
        break;
      }
      case XLA_FFI_AttrType_STRING: {
        const auto* string = static_cast<const XLA_FFI_ByteSpan*>(attribute);
        *text += "string:";
        Hex(string->ptr, string->len, text);
        break;
      }
      case XLA_FFI_AttrType_DICTIONARY:
        *text += '{';
        Describe(*static_cast<const XLA_FFI_Attrs*>(attribute), text);
        *text += '}';
        break;
    }
  }
}

// Answers the metadata query; the execution works on the C call frame itself.
ffi::Error Nothing() { return ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER(AnswerMetadata, Nothing, ffi::Ffi::Bind());

}  // namespace

#define TEST_HANDLER(name, implementation, ...)                                                         \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, implementation, __VA_ARGS__)

// clang-format off
TEST_HANDLER(xla_gpu_test_scale, Scale,
             ffi::Ffi::Bind()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>()
                 .Attr<float>("factor"));
TEST_HANDLER(xla_gpu_test_negate, Negate,
             ffi::Ffi::Bind()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>());
TEST_HANDLER(xla_gpu_test_two_results, TwoResults,
             ffi::Ffi::Bind()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>()   // plus_one
                 .Ret<ffi::Buffer<ffi::S32>>()); // count
TEST_HANDLER(xla_gpu_test_raw_copy, RawCopy,
             ffi::Ffi::Bind()
                 .Arg<ffi::AnyBuffer>()
                 .Ret<ffi::AnyBuffer>());
TEST_HANDLER(xla_gpu_test_raw_copy_cuda, RawCopyCuda,
             ffi::Ffi::Bind()
                 .Ctx<ffi::PlatformStream<Stream>>()
                 .Arg<ffi::AnyBuffer>()
                 .Ret<ffi::AnyBuffer>(),
             {ffi::Traits::kCmdBufferCompatible});
TEST_HANDLER(xla_gpu_test_fill_cuda, FillCuda,
             ffi::Ffi::Bind()
                 .Ctx<ffi::PlatformStream<Stream>>()
                 .Arg<ffi::AnyBuffer>()
                 .Ret<ffi::Buffer<ffi::F32>>()
                 .Attr<float>("value"),
             {ffi::Traits::kCmdBufferCompatible});
TEST_HANDLER(xla_gpu_test_increment, Increment,
             ffi::Ffi::Bind()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>());
TEST_HANDLER(xla_gpu_test_tick, Tick,
             ffi::Ffi::Bind()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>());
TEST_HANDLER(xla_gpu_test_fail, Fail,
             ffi::Ffi::Bind()
                 .Arg<ffi::AnyBuffer>()
                 .Ret<ffi::AnyBuffer>()
                 .Attr<int64_t>("code")
                 .Attr<std::string_view>("message"));
TEST_HANDLER(xla_gpu_test_staged_instantiate, Instantiate,
             ffi::Ffi::Bind<ffi::ExecutionStage::kInstantiate>().Attr<int64_t>("key"));
TEST_HANDLER(xla_gpu_test_staged_prepare, Prepare,
             ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>()
                 .RemainingArgs()
                 .RemainingRets()
                 .Attr<int64_t>("key"));
TEST_HANDLER(xla_gpu_test_staged_initialize, Initialize,
             ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                 .RemainingArgs()
                 .RemainingRets()
                 .Attr<int64_t>("key"));
TEST_HANDLER(xla_gpu_test_staged_execute, Execute,
             ffi::Ffi::Bind()
                 .Arg<ffi::Buffer<ffi::F32>>()
                 .Ret<ffi::Buffer<ffi::F32>>()
                 .Attr<int64_t>("key"));
// clang-format on

extern "C" {

// Writes the text into its one result, u8[n], filled up with zeros.
__attribute__((visibility("default"))) XLA_FFI_Error* xla_gpu_test_describe(XLA_FFI_CallFrame* call_frame) {
  if (call_frame->extension_start != nullptr) return AnswerMetadata(call_frame);
  std::string text;
  Describe(call_frame->attrs, &text);
  const auto* out = static_cast<const XLA_FFI_Buffer*>(call_frame->rets.rets[0]);
  const size_t size = static_cast<size_t>(out->dims[0]);
  std::memset(out->data, 0, size);
  std::memcpy(out->data, text.data(), text.size() < size ? text.size() : size);
  return nullptr;
}

__attribute__((visibility("default"))) int64_t xla_gpu_test_ticks() { return ticks; }

// Calls of instantiate, prepare, initialize, execute.
__attribute__((visibility("default"))) int64_t xla_gpu_test_stage_calls(int32_t stage) { return stage_calls[stage]; }

}  // extern "C"
