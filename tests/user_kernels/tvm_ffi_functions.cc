// Functions behind tvm-ffi, as a user would write them. test_tvm_ffi.py compiles this file.
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <string>

namespace ffi = tvm::ffi;

// y = factor * x
void Scale(ffi::TensorView x, double factor, ffi::TensorView y) {
  if (x.dtype().code != kDLFloat || x.dtype().bits != 32) TVM_FFI_THROW(ValueError) << "x: expected float32";
  for (int64_t i = 0; i < x.numel(); ++i) {
    static_cast<float*>(y.data_ptr())[i] = static_cast<float>(factor) * static_cast<const float*>(x.data_ptr())[i];
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale, Scale)

// Writes what it got as text into bytes: attributes, then the tensor's dtype, shape and strides.
void Describe(ffi::TensorView x, bool flag, int64_t n, double f, ffi::String text, ffi::TensorView out) {
  std::string all = std::to_string(flag) + " " + std::to_string(n) + " " + std::to_string(f) + " " + std::string(text);
  all += " " + std::to_string(x.dtype().code) + ":" + std::to_string(x.dtype().bits);
  for (int64_t i = 0; i < x.ndim(); ++i) all += " " + std::to_string(x.size(i)) + "/" + std::to_string(x.stride(i));
  for (int64_t i = 0; i < out.numel(); ++i) {
    static_cast<char*>(out.data_ptr())[i] = i < static_cast<int64_t>(all.size()) ? all[i] : '\0';
  }
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe, Describe)

void Fail(ffi::TensorView, ffi::TensorView) { TVM_FFI_THROW(RuntimeError) << "a text that only this function knows"; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fail, Fail)

// y = x on a GPU, on tvm-ffi's current stream; through the driver, so that no CUDA headers are needed.
void Copy(ffi::TensorView x, ffi::TensorView y) {
  if (x.device().device_type != kDLCUDA) TVM_FFI_THROW(ValueError) << "x: expected a tensor on a GPU";
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (driver == nullptr) TVM_FFI_THROW(RuntimeError) << "no CUDA driver";
  const auto copy = reinterpret_cast<int (*)(uint64_t, uint64_t, size_t, void*)>(dlsym(driver, "cuMemcpyDtoDAsync_v2"));
  void* const stream = TVMFFIEnvGetStream(kDLCUDA, x.device().device_id);
  const auto address = [](const ffi::TensorView& t) { return reinterpret_cast<uint64_t>(t.data_ptr()); };
  const int status = copy(address(y), address(x), x.numel() * x.dtype().bits / 8, stream);
  if (status != 0) TVM_FFI_THROW(RuntimeError) << "CUDA error " << status;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy, Copy)
