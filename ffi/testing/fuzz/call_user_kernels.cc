// Calls of users' kernels: launches of cubins, and tvm-ffi functions. On the host a launch is checked and then refused.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ffi/testing/fuzz/call.h"
#include "ffi/user_kernels/tvm_ffi_abi.h"

namespace xla_gpu::fuzz {

void Call::AddNumberArray(const char* name, const std::vector<int64_t>& values) {
  const size_t bytes = values.size() * sizeof(int64_t);
  void* data = std::malloc(bytes > 0 ? bytes : 1);
  memory_.emplace_back(static_cast<char*>(data), &std::free);
  if (bytes > 0) std::memcpy(data, values.data(), bytes);
  attributes_.push_back({name, XLA_FFI_AttrType_ARRAY, XLA_FFI_DataType_S64, data, values.size()});
}

void Call::KernelCall() {
  target_ = "xla_gpu_kernel_call";
  for (int64_t i = input_.Below(4); i > 0; --i) Add(&operands_, kFloats[input_.Below(3)], {input_.Below(9)});
  for (int64_t i = input_.Below(4); i > 0; --i) Add(&results_, kFloats[input_.Below(3)], {input_.Below(9)});
  const auto triple = [&](int64_t end) {
    Shape sizes(input_.Once(32) ? static_cast<size_t>(input_.Below(5)) : 3);
    for (int64_t& size : sizes) size = input_.Once(4) ? input_.Number(end) : 1;
    return sizes;
  };
  const auto text = [&](const char* name, bool elf) {
    auto* value = names_
                      .emplace_back(std::make_unique<std::string>(elf ? "\x7f"
                                                                        "ELF"
                                                                      : ""))
                      .get();
    for (int64_t i = input_.Below(40); i > 0; --i) value->push_back(static_cast<char>(input_.Byte()));
    const bool is_string = name[0] != 'c';
    attributes_.push_back({name, is_string ? XLA_FFI_AttrType_STRING : XLA_FFI_AttrType_ARRAY,
                           is_string ? 0 : int32_t{XLA_FFI_DataType_U8}, value->data(), value->size()});
  };
  Shape parameters = {input_.Below(7)};
  for (int64_t i = parameters[0]; i > 0; --i) {
    parameters.push_back(input_.Number(3));
    parameters.push_back(input_.Number(4));
    parameters.push_back(input_.Once(2) ? 8 : input_.Number(17));
  }
  if (input_.Once(8)) parameters[0] = input_.Number(9);
  if (input_.Once(32)) parameters.resize(static_cast<size_t>(input_.Below(3)));
  text("arch", false);
  AddNumberArray("block", triple(65));
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddNumberArray("cluster", triple(9));
  AddScalar("cooperative", XLA_FFI_DataType_PRED, input_.Once(2));
  text("cubin", !input_.Once(8));
  AddNumberArray("grid", triple(200));
  text("name", false);
  AddNumberArray("parameters", parameters);
  AddScalar("pdl", XLA_FFI_DataType_PRED, input_.Once(2));
  AddScalar("shared", XLA_FFI_DataType_S64, input_.Number(200));
}

// ---- tvm-ffi ----
namespace {

volatile int64_t sum = 0;  // so that no read is left out

int CallFunction(void*, void* untyped, int32_t num_arguments, void*) {
  const auto* arguments = static_cast<const tvm_ffi::Any*>(untyped);
  for (int32_t i = 0; i < num_arguments; ++i) {
    if (arguments[i].type_index == tvm_ffi::kRawString) {
      sum = sum + static_cast<int64_t>(std::strlen(static_cast<const char*>(arguments[i].v_ptr)));
    } else if (arguments[i].type_index == tvm_ffi::kTensorPointer) {
      const auto* tensor = static_cast<const tvm_ffi::Tensor*>(arguments[i].v_ptr);
      int64_t stride = 1;
      for (int32_t axis = tensor->ndim; axis-- > 0;) {
        if (tensor->shape[axis] < 0 || tensor->strides[axis] != stride) std::abort();
        if (__builtin_mul_overflow(stride, tensor->shape[axis], &stride)) return 0;  // of buffers without memory
      }
      if (stride > 0 && tensor->data != nullptr) sum = sum + *static_cast<const char*>(tensor->data);
    } else {
      sum = sum + arguments[i].v_int64;
    }
  }
  return sum % 16 == 0 ? -1 : 0;
}

int SetStream(int32_t, int32_t, void*, void**) { std::abort(); }  // no host function has a stream

void MoveError(void** error) {
  static tvm_ffi::ErrorObject object = {{}, {"ValueError", 10}, {"a reason", 8}};
  *error = &object;
}

int DecreaseReference(void*) { return 0; }

}  // namespace

XLA_FFI_Handler* TvmFfiHandler() {
  static XLA_FFI_Handler* const handler = [] {
    const xla_gpu_tvm_ffi_api api = {sizeof api, CallFunction, SetStream, MoveError, DecreaseReference};
    const char* const arguments[] = {"args", "rets", "attrs.scale", "args.1", "attrs.a", "ctx.stream"};
    int function = 0;
    const xla_gpu_tvm_ffi_target target = {sizeof target, "fuzzed", &function, arguments, std::size(arguments), 0, 0};
    XLA_FFI_Handler* made = nullptr;
    if (const char* error = xla_gpu_tvm_ffi_register(&api, &target, &made)) {
      std::fprintf(stderr, "%s\n", error);
      std::abort();
    }
    return made;
  }();
  return handler;
}

}  // namespace xla_gpu::fuzz
