// The arguments of a tvm-ffi function, made of a call's buffers and attributes.
#ifndef XLA_GPU_USER_KERNELS_TVM_FFI_ARGUMENTS_H_
#define XLA_GPU_USER_KERNELS_TVM_FFI_ARGUMENTS_H_

#include <cstring>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/handlers/check.h"
#include "ffi/user_kernels/tvm_ffi_abi.h"
#include "xla/ffi/api/ffi.h"

namespace xla_gpu::tvm_ffi {

inline std::optional<Dtype> ToDtype(ffi::DataType dtype) {
  const auto make = [](uint8_t code, int bits) { return Dtype{code, static_cast<uint8_t>(bits), 1}; };
  switch (dtype) {
    case ffi::DataType::PRED:
      return make(kBool, 8);
    case ffi::DataType::S8:
      return make(kInt, 8);
    case ffi::DataType::S16:
      return make(kInt, 16);
    case ffi::DataType::S32:
      return make(kInt, 32);
    case ffi::DataType::S64:
      return make(kInt, 64);
    case ffi::DataType::U8:
      return make(kUInt, 8);
    case ffi::DataType::U16:
      return make(kUInt, 16);
    case ffi::DataType::U32:
      return make(kUInt, 32);
    case ffi::DataType::U64:
      return make(kUInt, 64);
    case ffi::DataType::F16:
      return make(kFloat, 16);
    case ffi::DataType::F32:
      return make(kFloat, 32);
    case ffi::DataType::F64:
      return make(kFloat, 64);
    case ffi::DataType::BF16:
      return make(kBfloat, 16);
    case ffi::DataType::C64:
      return make(kComplex, 64);
    case ffi::DataType::C128:
      return make(kComplex, 128);
    case ffi::DataType::F8E3M4:
      return make(kFloat8E3M4, 8);
    case ffi::DataType::F8E4M3:
      return make(kFloat8E4M3, 8);
    case ffi::DataType::F8E4M3B11FNUZ:
      return make(kFloat8E4M3B11FNUZ, 8);
    case ffi::DataType::F8E4M3FN:
      return make(kFloat8E4M3FN, 8);
    case ffi::DataType::F8E4M3FNUZ:
      return make(kFloat8E4M3FNUZ, 8);
    case ffi::DataType::F8E5M2:
      return make(kFloat8E5M2, 8);
    case ffi::DataType::F8E5M2FNUZ:
      return make(kFloat8E5M2FNUZ, 8);
    case ffi::DataType::F8E8M0FNU:
      return make(kFloat8E8M0FNU, 8);
    default:
      return std::nullopt;
  }
}

// The arguments of one call, with what they point to.
class Arguments {
 public:
  explicit Arguments(Device device) : device_(device) {}

  ffi::Error AddTensor(const std::string& op, const std::string& what, const ffi::AnyBuffer& buffer) {
    const std::optional<Dtype> dtype = ToDtype(buffer.element_type());
    if (!dtype) return Mismatch(op.c_str(), what.c_str(), "a dtype that DLPack has", DTypeText(buffer.element_type()));
    const auto dims = buffer.dimensions();
    auto& [shape, strides, tensor] = tensors_.emplace_back();
    shape.assign(dims.begin(), dims.end());
    strides.resize(shape.size());
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      strides[i] = stride;
      stride *= shape[i];
    }
    tensor = {buffer.untyped_data(), device_, static_cast<int32_t>(shape.size()), *dtype, shape.data(),
              strides.data(),        0};
    AddPointer(kTensorPointer, &tensor);
    return ffi::Error::Success();
  }

  void AddPointer(int32_t type_index, void* pointer) {
    Any any = {type_index, 0, {}};
    any.v_ptr = pointer;
    values_.push_back(any);
  }

  ffi::Error AddAttribute(const std::string& op, const std::string& name, const XLA_FFI_Attrs& attributes) {
    for (int64_t i = 0; i < attributes.size; ++i) {
      if (std::string_view(attributes.names[i]->ptr, attributes.names[i]->len) != name) continue;
      const std::string what = "attribute " + name;
      if (attributes.types[i] == XLA_FFI_AttrType_STRING) {
        const auto* text = static_cast<const XLA_FFI_ByteSpan*>(attributes.attrs[i]);
        AddPointer(kRawString, strings_.emplace_back(text->ptr, text->len).data());
        return ffi::Error::Success();
      }
      if (attributes.types[i] == XLA_FFI_AttrType_SCALAR) {
        const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attributes.attrs[i]);
        if (AddScalar(*scalar)) return ffi::Error::Success();
      }
      return Mismatch(op.c_str(), what.c_str(), "a bool, an integer, a float or a string", "another type");
    }
    return Mismatch(op.c_str(), ("attribute " + name).c_str(), "a value, since the function takes one", "none");
  }

  Any* data() { return values_.data(); }
  int32_t size() const { return static_cast<int32_t>(values_.size()); }

 private:
  template <typename T>
  static T Read(const XLA_FFI_Scalar& scalar) {
    T value;
    std::memcpy(&value, scalar.value, sizeof value);
    return value;
  }

  void AddInt(int64_t value) {
    Any any = {kAnyInt, 0, {}};
    any.v_int64 = value;
    values_.push_back(any);
  }

  void AddFloat(double value) {
    Any any = {kAnyFloat, 0, {}};
    any.v_float64 = value;
    values_.push_back(any);
  }

  bool AddScalar(const XLA_FFI_Scalar& scalar) {
    switch (scalar.dtype) {
      case XLA_FFI_DataType_PRED: {
        AddInt(Read<uint8_t>(scalar) != 0);
        values_.back().type_index = kAnyBool;
        return true;
      }
      case XLA_FFI_DataType_S8:
        AddInt(Read<int8_t>(scalar));
        return true;
      case XLA_FFI_DataType_S16:
        AddInt(Read<int16_t>(scalar));
        return true;
      case XLA_FFI_DataType_S32:
        AddInt(Read<int32_t>(scalar));
        return true;
      case XLA_FFI_DataType_S64:
        AddInt(Read<int64_t>(scalar));
        return true;
      case XLA_FFI_DataType_U8:
        AddInt(Read<uint8_t>(scalar));
        return true;
      case XLA_FFI_DataType_U16:
        AddInt(Read<uint16_t>(scalar));
        return true;
      case XLA_FFI_DataType_U32:
        AddInt(Read<uint32_t>(scalar));
        return true;
      case XLA_FFI_DataType_U64: {
        const auto value = Read<uint64_t>(scalar);
        if (value > static_cast<uint64_t>(INT64_MAX)) return false;  // tvm-ffi's integers have 64 bits and a sign
        AddInt(static_cast<int64_t>(value));
        return true;
      }
      case XLA_FFI_DataType_F32:
        AddFloat(static_cast<double>(Read<float>(scalar)));
        return true;
      case XLA_FFI_DataType_F64:
        AddFloat(Read<double>(scalar));
        return true;
      default:
        return false;
    }
  }

  struct OwnedTensor {
    std::vector<int64_t> shape, strides;
    Tensor tensor;
  };

  Device device_;
  std::deque<OwnedTensor> tensors_;  // their addresses stay
  std::deque<std::string> strings_;
  std::vector<Any> values_;
};

}  // namespace xla_gpu::tvm_ffi

#endif  // XLA_GPU_USER_KERNELS_TVM_FFI_ARGUMENTS_H_
