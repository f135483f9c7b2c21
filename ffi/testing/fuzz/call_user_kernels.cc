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

namespace {

void Append(std::string* file, std::initializer_list<uint64_t> values, size_t size) {
  for (const uint64_t value : values) file->append(reinterpret_cast<const char*>(&value), size);
}

// A cubin of one kernel without machine code: names, symbols, attributes, code and relocations.
std::string SmallCubin() {
  struct Section {
    uint64_t type;
    std::string contents;
    uint64_t link, info, entry_size;
  };
  std::string symbols(24, '\0'), attribute, relocation;
  Append(&symbols, {uint64_t{5} << 48 | uint64_t{0x1012} << 32 | 1, 0, 16}, 8);
  Append(&attribute, {0x000c1704, 0, 0, 8 << 18}, 4);
  Append(&relocation, {8, uint64_t{1} << 32 | 2, 0}, 8);
  const std::string names("\0names", 7), text("\0k", 3);
  const Section sections[] = {{3, names, 0, 0, 0},
                              {3, text, 0, 0, 0},
                              {2, symbols, 2, 1, 24},
                              {0x70000000, attribute, 3, 5, 0},
                              {1, std::string(16, '\0'), 3, 1, 0},
                              {4, relocation, 3, 5, 24}};
  std::string contents, headers(64, '\0');
  for (const Section& section : sections) {
    Append(&headers, {1, section.type}, 4);
    Append(&headers, {section.type == 1 ? 6u : 0u, 0, 64 + contents.size(), section.contents.size()}, 8);
    Append(&headers, {section.link, section.info}, 4);
    Append(&headers, {8, section.entry_size}, 8);
    contents += section.contents;
    contents.resize((contents.size() + 7) / 8 * 8);
  }
  std::string file(
      "\x7f"
      "ELF\x02\x01\x01\x33\x07",
      9);
  file.resize(16);
  Append(&file, {2, 190}, 2);
  Append(&file, {1}, 4);
  Append(&file, {0, 0, 64 + contents.size()}, 8);
  Append(&file, {0x5a055a}, 4);
  Append(&file, {64, 56, 0, 64, headers.size() / 64, 1}, 2);
  return file + contents + headers;
}

}  // namespace

void Call::Cubin() {
  auto* file = names_.emplace_back(std::make_unique<std::string>(SmallCubin())).get();
  for (int64_t i = input_.Below(4); i > 0; --i) {
    const size_t at = input_.Raw<uint16_t>() % file->size();
    (*file)[at] = static_cast<char>(input_.Byte());
  }
  if (input_.Once(8)) file->resize(input_.Raw<uint16_t>() % file->size());
  file->shrink_to_fit();  // so that a read past the end is noticed
  attributes_.push_back({"cubin", XLA_FFI_AttrType_ARRAY, XLA_FFI_DataType_U8, file->data(), file->size()});
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
  const auto text = [&](const char* name) {
    auto* value = names_.emplace_back(std::make_unique<std::string>()).get();
    for (int64_t i = input_.Below(40); i > 0; --i) value->push_back(static_cast<char>(input_.Byte()));
    attributes_.push_back({name, XLA_FFI_AttrType_STRING, 0, value->data(), value->size()});
  };
  Shape parameters = {input_.Below(7)};
  for (int64_t i = parameters[0]; i > 0; --i) {
    parameters.push_back(input_.Number(3));
    parameters.push_back(input_.Number(4));
    parameters.push_back(input_.Once(2) ? 8 : input_.Number(17));
  }
  if (input_.Once(8)) parameters[0] = input_.Number(9);
  if (input_.Once(32)) parameters.resize(static_cast<size_t>(input_.Below(3)));
  text("arch");
  AddNumberArray("block", triple(65));
  AddScalar("check_inputs", XLA_FFI_DataType_PRED, input_.Once(2));
  AddNumberArray("cluster", triple(9));
  AddScalar("cooperative", XLA_FFI_DataType_PRED, input_.Once(2));
  Cubin();
  AddNumberArray("grid", triple(200));
  text("name");
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
