#include "ffi/runtime/device.h"

#include <algorithm>
#include <string>

#ifdef XLA_GPU_WITH_CUDA
#include <cuda.h>
#include <cuda_runtime_api.h>
#endif

namespace xla_gpu {
namespace {

#ifdef XLA_GPU_WITH_CUDA
Error CudaError(const char* call, cudaError_t status) {
  std::string text = std::string(call) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice || status == cudaErrorStubLibrary) {
    text += " (this machine has no NVIDIA GPU or driver, or a driver older than CUDA " XLA_GPU_CUDA_VERSION
            " needs; nvidia-smi shows both)";
  }
  // Clears the error that the CUDA runtime keeps for this thread. Otherwise the next launch would report it again.
  cudaGetLastError();
  return Error::Internal(std::move(text));
}

// NOTE: the driver's functions come from the runtime: the library must load where there is no driver.
template <typename Function>
Function DriverFunction(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();
  return reinterpret_cast<Function>(error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr);
}

// Whether this process has a primary context on the device. cudaSetDevice makes one where there is none, which takes
// hundreds of megabytes of a GPU that may be another process's.
bool HasPrimaryContext(int device) {
  static const auto get_state =
      DriverFunction<CUresult (*)(CUdevice, unsigned*, int*)>("cuDevicePrimaryCtxGetState", 7000);
  unsigned flags = 0;
  int active = 0;
  return get_state == nullptr || get_state(device, &flags, &active) != CUDA_SUCCESS || active != 0;
}

// A device's primary context on top of the thread's stack of contexts. Off it again, the thread is as it was; a thread
// that had no context has none, while cudaSetDevice(0) at the end would make one on device 0.
struct ContextStack {
  using Retain = CUresult (*)(CUcontext*, CUdevice);
  using Release = CUresult (*)(CUdevice);
  using Push = CUresult (*)(CUcontext);
  using Pop = CUresult (*)(CUcontext*);
  Retain retain = DriverFunction<Retain>("cuDevicePrimaryCtxRetain", 7000);
  Release release = DriverFunction<Release>("cuDevicePrimaryCtxRelease", 11000);
  Push push = DriverFunction<Push>("cuCtxPushCurrent", 4000);
  Pop pop = DriverFunction<Pop>("cuCtxPopCurrent", 4000);

  CUresult PushPrimary(int device) const {
    if (retain == nullptr || release == nullptr || push == nullptr || pop == nullptr) return CUDA_ERROR_NOT_FOUND;
    int devices = 0;
    cudaGetDeviceCount(&devices);  // initialises the driver where it is not yet
    CUcontext context = nullptr;
    if (CUresult result = retain(&context, device); result != CUDA_SUCCESS) return result;
    const CUresult result = push(context);
    if (result != CUDA_SUCCESS) release(device);
    return result;
  }
  void PopPrimary(int device) const {
    CUcontext context = nullptr;
    pop(&context);
    release(device);
  }
};

const ContextStack& Contexts() {
  static const ContextStack contexts;
  return contexts;
}

// cudaMallocAsync aligns to this much; it takes no argument for more.
constexpr size_t kCudaAlignment = 256;
#else
Error NoCuda() { return Error::FailedPrecondition("this library was built without CUDA (XLA_GPU_CUDA=OFF)"); }
#endif

}  // namespace

DeviceScope::DeviceScope(int32_t device_ordinal) {
  if (device_ordinal < 0) return;
#ifdef XLA_GPU_WITH_CUDA
  int current = -1;
  if (cudaError_t status = cudaGetDevice(&current); status != cudaSuccess) {
    error_ = CudaError("cudaGetDevice", status);
    return;
  }
  if (current == device_ordinal) return;
  if (const CUresult result = Contexts().PushPrimary(device_ordinal); result != CUDA_SUCCESS) {
    // The driver's errors have the runtime's numbers.
    error_ = CudaError(("the context of device " + std::to_string(device_ordinal)).c_str(),
                       static_cast<cudaError_t>(result));
    return;
  }
  pushed_ = device_ordinal;
#else
  error_ = NoCuda();
#endif
}

DeviceScope::~DeviceScope() {
#ifdef XLA_GPU_WITH_CUDA
  if (pushed_ >= 0) Contexts().PopPrimary(pushed_);
#endif
}

CurrentDeviceKept::CurrentDeviceKept() {
#ifdef XLA_GPU_WITH_CUDA
  if (cudaGetDevice(&current_) == cudaSuccess) return;
  current_ = -1;
  cudaGetLastError();
#endif
}

CurrentDeviceKept::~CurrentDeviceKept() {
#ifdef XLA_GPU_WITH_CUDA
  int now = -1;
  if (current_ >= 0 && cudaGetDevice(&now) == cudaSuccess && now != current_ && HasPrimaryContext(current_)) {
    cudaSetDevice(current_);
  }
  if (current_ >= 0) cudaGetLastError();
#endif
}

Error AllocateMemory(int32_t device_ordinal, [[maybe_unused]] void* stream, size_t size, size_t alignment,
                     void** data) {
  *data = nullptr;
  if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
    return Error::InvalidArgument("allocating memory: alignment " + std::to_string(alignment) +
                                  " is not a power of two");
  }
  if (size == 0) return {};
  if (device_ordinal < 0) {
    const int status = posix_memalign(data, std::max(alignment, sizeof(void*)), size);
    if (status == 0) return {};
    *data = nullptr;
    return {XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "allocating " + std::to_string(size) + " bytes: out of memory"};
  }
#ifdef XLA_GPU_WITH_CUDA
  if (alignment > kCudaAlignment) {
    return Error::InvalidArgument("allocating device memory: alignment " + std::to_string(alignment) +
                                  ", expected at most " + std::to_string(kCudaAlignment));
  }
  if (cudaError_t status = cudaMallocAsync(data, size, static_cast<cudaStream_t>(stream)); status != cudaSuccess) {
    *data = nullptr;
    return CudaError(("cudaMallocAsync of " + std::to_string(size) + " bytes").c_str(), status);
  }
  return {};
#else
  return NoCuda();
#endif
}

Error FreeMemory(int32_t device_ordinal, [[maybe_unused]] void* stream, void* data) {
  if (device_ordinal < 0) {
    free(data);
    return {};
  }
#ifdef XLA_GPU_WITH_CUDA
  if (cudaError_t status = cudaFreeAsync(data, static_cast<cudaStream_t>(stream)); status != cudaSuccess) {
    return CudaError("cudaFreeAsync", status);
  }
  return {};
#else
  return NoCuda();
#endif
}

Error RecordEvent([[maybe_unused]] void* stream, void** event) {
  *event = nullptr;
#ifdef XLA_GPU_WITH_CUDA
  cudaEvent_t made = nullptr;
  if (cudaError_t status = cudaEventCreateWithFlags(&made, cudaEventDisableTiming); status != cudaSuccess) {
    return CudaError("cudaEventCreateWithFlags", status);
  }
  if (cudaError_t status = cudaEventRecord(made, static_cast<cudaStream_t>(stream)); status != cudaSuccess) {
    cudaEventDestroy(made);
    return CudaError("cudaEventRecord", status);
  }
  *event = made;
#endif
  return {};
}

bool TakeCompletedEvent([[maybe_unused]] void* event) {
#ifdef XLA_GPU_WITH_CUDA
  if (event == nullptr) return true;
  if (cudaEventQuery(static_cast<cudaEvent_t>(event)) == cudaErrorNotReady) return false;
  cudaGetLastError();
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
#endif
  return true;
}

Error OrderStreams([[maybe_unused]] void* first, [[maybe_unused]] void* then) {
#ifdef XLA_GPU_WITH_CUDA
  void* event = nullptr;
  if (Error error = RecordEvent(first, &event); !error.ok()) return error;
  const cudaError_t status =
      cudaStreamWaitEvent(static_cast<cudaStream_t>(then), static_cast<cudaEvent_t>(event), /*flags=*/0);
  cudaEventDestroy(static_cast<cudaEvent_t>(event));  // freed when the stream is past it
  if (status != cudaSuccess) return CudaError("cudaStreamWaitEvent", status);
#endif
  return {};
}

Error SynchronizeStream([[maybe_unused]] void* stream) {
#ifdef XLA_GPU_WITH_CUDA
  if (cudaError_t status = cudaStreamSynchronize(static_cast<cudaStream_t>(stream)); status != cudaSuccess) {
    return CudaError("cudaStreamSynchronize", status);
  }
#endif
  return {};
}

}  // namespace xla_gpu
