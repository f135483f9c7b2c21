// Typed handlers that call tvm-ffi functions. A runtime gives a handler no hint of the name that it was registered by,
// so each registered function has a handler of its own, out of a fixed number.
#include <array>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/runtime/error.h"
#include "ffi/runtime/xla_gpu.h"
#include "ffi/user_kernels/tvm_ffi_abi.h"
#include "ffi/user_kernels/tvm_ffi_arguments.h"
#ifdef XLA_GPU_WITH_CUDA
#include "ffi/device/host_copy.h"
#endif

namespace xla_gpu::tvm_ffi {

// All attributes of a call as they lie in its frame.
struct RawAttributes {
  const XLA_FFI_Attrs* attributes;
};

}  // namespace xla_gpu::tvm_ffi

template <>
struct xla::ffi::internal::Decode<xla::ffi::internal::AttrsTag<xla_gpu::tvm_ffi::RawAttributes>> {
  static std::optional<xla_gpu::tvm_ffi::RawAttributes> call(DecodingOffsets&, DecodingContext& context,
                                                             DiagnosticEngine&) {
    return xla_gpu::tvm_ffi::RawAttributes{&context.call_frame->attrs};
  }
};

namespace xla_gpu::tvm_ffi {
namespace {

// ---- Registered functions ----

// What a function takes at one place: all operands, one of them, an attribute.
struct Argument {
  enum Kind { kOperands, kResults, kOperand, kResult, kAttribute, kStream } kind;
  size_t index = 0;       // of kOperand and kResult
  std::string attribute;  // of kAttribute
};

struct Function {
  std::string name;
  void* handle = nullptr;
  std::vector<Argument> arguments;
  bool on_cuda = false;
  bool allow_capture = false;
};

constexpr size_t kSlots = 128;
std::mutex mutex;  // of registrations; a slot is written once, before its handler is handed out
std::array<Function, kSlots> functions;
size_t num_functions = 0;
xla_gpu_tvm_ffi_api api = {};

thread_local size_t current_slot = 0;  // set by a slot's handler for the shared one

// ---- Arguments ----

ffi::Error AddArgument(const Function& function, const Argument& argument, const ffi::RemainingArgs& operands,
                       const ffi::RemainingRets& results, const XLA_FFI_Attrs& attributes, void* stream,
                       Arguments* arguments) {
  const std::string& op = function.name;
  const auto add_operand = [&](size_t i) -> ffi::Error {
    auto buffer = operands.get<ffi::AnyBuffer>(i);
    if (!buffer) return Mismatch(op.c_str(), "operands", StrCat(i + 1, " or more"), StrCat(operands.size()));
    return arguments->AddTensor(op, StrCat("operand ", i), *buffer);
  };
  const auto add_result = [&](size_t i) -> ffi::Error {
    auto buffer = results.get<ffi::AnyBuffer>(i);
    if (!buffer) return Mismatch(op.c_str(), "results", StrCat(i + 1, " or more"), StrCat(results.size()));
    return arguments->AddTensor(op, StrCat("result ", i), **buffer);
  };
  switch (argument.kind) {
    case Argument::kOperands:
      for (size_t i = 0; i < operands.size(); ++i) XLA_GPU_RETURN_IF_ERROR(add_operand(i));
      return ffi::Error::Success();
    case Argument::kResults:
      for (size_t i = 0; i < results.size(); ++i) XLA_GPU_RETURN_IF_ERROR(add_result(i));
      return ffi::Error::Success();
    case Argument::kOperand:
      return add_operand(argument.index);
    case Argument::kResult:
      return add_result(argument.index);
    case Argument::kAttribute:
      return arguments->AddAttribute(op, argument.attribute, attributes);
    case Argument::kStream:
      arguments->AddPointer(kOpaquePointer, stream);
      return ffi::Error::Success();
  }
  return ffi::Error::Success();
}

// ---- The call ----

ffi::Error RaisedError(const Function& function) {
  void* object = nullptr;
  api.error_move_from_raised(&object);
  if (object == nullptr) return ffi::Error::Internal(function.name + ": it failed and gave no reason");
  const auto* error = static_cast<const ErrorObject*>(object);
  const std::string kind(error->kind.data, error->kind.size);
  const std::string text = function.name + ": " + kind + ": " + std::string(error->message.data, error->message.size);
  api.object_dec_ref(object);
  const bool invalid = kind == "ValueError" || kind == "TypeError";
  return invalid ? ffi::Error::InvalidArgument(text) : ffi::Error::Internal(text);
}

ffi::Error Call(const Function& function, Arguments* arguments) {
  Any result = {kNone, 0, {}};
  result.v_int64 = 0;
  const int status = api.function_call(function.handle, arguments->data(), arguments->size(), &result);
  if (status != 0) return RaisedError(function);
  if (result.type_index >= kFirstObject) api.object_dec_ref(result.v_ptr);  // results are written into buffers
  return ffi::Error::Success();
}

ffi::Error AddArguments(const Function& function, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                        RawAttributes attributes, void* stream, Arguments* arguments) {
  for (const Argument& argument : function.arguments) {
    XLA_GPU_RETURN_IF_ERROR(
        AddArgument(function, argument, operands, results, *attributes.attributes, stream, arguments));
  }
  return ffi::Error::Success();
}

ffi::Error CallOnHost(CallContext, ffi::RemainingArgs operands, ffi::RemainingRets results, RawAttributes attributes) {
  const Function& function = functions[current_slot];
  return NoThrow("tvm_ffi", [&]() -> ffi::Error {
    Arguments arguments({kCpu, 0});
    XLA_GPU_RETURN_IF_ERROR(AddArguments(function, operands, results, attributes, nullptr, &arguments));
    return Call(function, &arguments);
  });
}

XLA_FFI_DEFINE_HANDLER(HostHandler, CallOnHost, XLA_GPU_BIND().RemainingArgs().RemainingRets().Attrs<RawAttributes>());

#ifdef XLA_GPU_WITH_CUDA
// Makes `stream` the one on which tvm-ffi functions of this thread launch, as long as the scope lives.
class StreamScope {
 public:
  StreamScope(int device, void* stream) : device_(device) { api.env_set_stream(kCuda, device, stream, &previous_); }
  ~StreamScope() { api.env_set_stream(kCuda, device_, previous_, nullptr); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  int device_;
  void* previous_ = nullptr;
};

ffi::Error CallOnCuda(CallContext context, ffi::RemainingArgs operands, ffi::RemainingRets results,
                      RawAttributes attributes) {
  const Function& function = functions[current_slot];
  return NoThrow("tvm_ffi", [&]() -> ffi::Error {
    int device = 0;
    if (Status status = CurrentDevice(&device); !status.ok()) return ToError(status);
    const Stream stream = context.stream();
    Arguments arguments({kCuda, device});
    XLA_GPU_RETURN_IF_ERROR(AddArguments(function, operands, results, attributes, stream, &arguments));
    const StreamScope scope(device, stream);
    return Call(function, &arguments);
  });
}

XLA_FFI_DEFINE_HANDLER(CudaHandler, CallOnCuda, XLA_GPU_BIND().RemainingArgs().RemainingRets().Attrs<RawAttributes>());
XLA_FFI_DEFINE_HANDLER(CapturedHandler, CallOnCuda,
                       XLA_GPU_BIND().RemainingArgs().RemainingRets().Attrs<RawAttributes>(), CaptureTraits());
#endif

// ---- Handlers of the slots ----

template <size_t kSlot>
XLA_FFI_Error* SlotHandler(XLA_FFI_CallFrame* frame) {
  current_slot = kSlot;
#ifdef XLA_GPU_WITH_CUDA
  if (functions[kSlot].on_cuda) {
    return functions[kSlot].allow_capture ? CapturedHandler(frame) : CudaHandler(frame);
  }
#endif
  return HostHandler(frame);
}

template <size_t... kSlot>
constexpr std::array<XLA_FFI_Handler*, sizeof...(kSlot)> SlotHandlers(std::index_sequence<kSlot...>) {
  return {SlotHandler<kSlot>...};
}

constexpr auto kHandlers = SlotHandlers(std::make_index_sequence<kSlots>());

// ---- Registration ----

Error ParseArgument(const std::string& text, Argument* argument) {
  const auto index_after = [&](size_t prefix) -> std::optional<size_t> {
    const std::string digits = text.substr(prefix);
    if (digits.empty() || digits.size() > 4 || digits.find_first_not_of("0123456789") != std::string::npos) return {};
    return std::stoul(digits);
  };
  if (text == "args") {
    argument->kind = Argument::kOperands;
  } else if (text == "rets") {
    argument->kind = Argument::kResults;
  } else if (text == "ctx.stream") {
    argument->kind = Argument::kStream;
  } else if (text.rfind("attrs.", 0) == 0 && text.size() > 6) {
    argument->kind = Argument::kAttribute;
    argument->attribute = text.substr(6);
  } else if ((text.rfind("args.", 0) == 0 || text.rfind("rets.", 0) == 0) && index_after(5)) {
    argument->kind = text[0] == 'a' ? Argument::kOperand : Argument::kResult;
    argument->index = *index_after(5);
  } else {
    return Error::InvalidArgument(
        "arguments: expected 'args', 'rets', 'args.<i>', 'rets.<i>', 'attrs.<name>' or 'ctx.stream', got '" + text +
        "'");
  }
  return {};
}

Error Register(const xla_gpu_tvm_ffi_api* given_api, const xla_gpu_tvm_ffi_target* target, XLA_FFI_Handler** handler) {
  if (given_api == nullptr || target == nullptr || handler == nullptr) return Error::InvalidArgument("a null pointer");
  if (given_api->struct_size != sizeof *given_api || target->struct_size != sizeof *target) {
    return Error::InvalidArgument("the caller and the library are of different versions");
  }
  if (given_api->function_call == nullptr || given_api->env_set_stream == nullptr ||
      given_api->error_move_from_raised == nullptr || given_api->object_dec_ref == nullptr ||
      target->function == nullptr || target->name == nullptr || target->arguments == nullptr) {
    return Error::InvalidArgument("a null pointer");
  }
#ifndef XLA_GPU_WITH_CUDA
  if (target->on_cuda) {
    return Error::FailedPrecondition("this library was built without CUDA (XLA_GPU_CUDA=OFF)");
  }
#endif
  Function function;
  function.name = target->name;
  function.handle = target->function;
  function.on_cuda = target->on_cuda != 0;
  function.allow_capture = target->allow_capture != 0;
  for (size_t i = 0; i < target->num_arguments; ++i) {
    if (Error error = ParseArgument(target->arguments[i], &function.arguments.emplace_back()); !error.ok())
      return error;
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (num_functions == kSlots) {
    return {XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
            "expected at most " + std::to_string(kSlots) + " functions in a process, got one more"};
  }
  api = *given_api;
  functions[num_functions] = std::move(function);
  *handler = kHandlers[num_functions];
  ++num_functions;
  return {};
}

}  // namespace
}  // namespace xla_gpu::tvm_ffi

extern "C" const char* xla_gpu_tvm_ffi_register(const xla_gpu_tvm_ffi_api* api, const xla_gpu_tvm_ffi_target* target,
                                                XLA_FFI_Handler** handler) {
  return xla_gpu::Report(
      xla_gpu::Guarded("xla_gpu_tvm_ffi_register", [&] { return xla_gpu::tvm_ffi::Register(api, target, handler); }));
}
