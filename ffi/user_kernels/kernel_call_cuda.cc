// kernel_call on a GPU, through the CUDA driver. Its functions are taken from the runtime: the library must load where
// there is no driver.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "ffi/base/cuda_status.h"
#include "ffi/user_kernels/kernel_call.h"

namespace xla_gpu {
namespace {

// ---- The driver's functions ----

struct Driver {
  CUresult (*library_load)(CUlibrary*, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                           unsigned) = nullptr;
  CUresult (*library_get_kernel)(CUkernel*, CUlibrary, const char*) = nullptr;
  CUresult (*kernel_set_attribute)(CUfunction_attribute, int, CUkernel, CUdevice) = nullptr;
  CUresult (*kernel_get_attribute)(int*, CUfunction_attribute, CUkernel, CUdevice) = nullptr;
  CUresult (*kernel_get_param_info)(CUkernel, size_t, size_t*, size_t*) = nullptr;  // null before CUDA 12.4
  CUresult (*launch)(const CUlaunchConfig*, CUfunction, void**, void**) = nullptr;
  CUresult (*get_error_name)(CUresult, const char**) = nullptr;
  CUresult (*get_error_string)(CUresult, const char**) = nullptr;

  bool complete() const {
    return library_load && library_get_kernel && kernel_set_attribute && kernel_get_attribute && launch &&
           get_error_name && get_error_string;
  }
};

template <typename Function>
void Find(const char* name, unsigned version, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result) == cudaSuccess &&
      result == cudaDriverEntryPointSuccess) {
    *function = reinterpret_cast<Function>(found);
  } else {
    cudaGetLastError();
  }
}

const Driver& GetDriver() {
  static const Driver driver = [] {
    Driver d;
    Find("cuLibraryLoadData", 12000, &d.library_load);
    Find("cuLibraryGetKernel", 12000, &d.library_get_kernel);
    Find("cuKernelSetAttribute", 12000, &d.kernel_set_attribute);
    Find("cuKernelGetAttribute", 12000, &d.kernel_get_attribute);
    Find("cuKernelGetParamInfo", 12040, &d.kernel_get_param_info);
    Find("cuLaunchKernelEx", 11060, &d.launch);
    Find("cuGetErrorName", 6000, &d.get_error_name);
    Find("cuGetErrorString", 6000, &d.get_error_string);
    return d;
  }();
  return driver;
}

std::string ErrorText(CUresult error) {
  const char *name = nullptr, *text = nullptr;
  GetDriver().get_error_name(error, &name);
  GetDriver().get_error_string(error, &text);
  return std::string(name ? name : "an unknown error") + " (" + (text ? text : std::to_string(error).c_str()) + ")";
}

std::string Name(const KernelLaunch& launch) { return "kernel_call: " + std::string(launch.name) + ": "; }

// Errors after which the context, and with it the process's use of the GPU, is lost.
bool IsFault(CUresult error) {
  switch (error) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
      return true;
    default:
      return false;
  }
}

Status DriverError(const KernelLaunch& launch, const char* call, CUresult error) {
  std::string text = Name(launch) + call + ": " + ErrorText(error);
  if (IsFault(error)) {
    text +=
        "; a kernel that ran before on this GPU faulted, and the process cannot use the GPU any more: start it anew, "
        "with XLA_GPU_CHECK_INPUTS=1 to be told which kernel it is";
  }
  return Status::Internal(std::move(text));
}

std::string DeviceText(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return "GPU " + std::to_string(device) + " of compute capability " + std::to_string(major) + "." +
         std::to_string(minor);
}

// ---- Loaded kernels: kept until the process ends, since captured graphs hold them ----

// Loading code counts as unsafe while any thread captures a graph. This thread is exempt as long as the scope lives.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct LoadedKernel {
  std::string name;
  std::string cubin;
  CUkernel kernel = nullptr;
  bool knows_parameters = false;
  std::vector<size_t> parameter_sizes;
  std::mutex mutex;                                // of what follows
  std::unordered_map<int, int64_t> shared_limits;  // dynamic shared memory that the kernel may have, by device
};

class KernelCache {
 public:
  Status Get(const KernelLaunch& launch, int device, LoadedKernel** found) {
    std::lock_guard<std::mutex> lock(mutex_);
    // The whole cubin is compared: two programs never share a kernel by accident. Different ones differ early.
    auto& kernels = kernels_[launch.cubin.size()];
    for (const auto& kernel : kernels) {
      if (kernel->name == launch.name && kernel->cubin == launch.cubin) {
        *found = kernel.get();
        return Status::Ok();
      }
    }
    if (Status status = CheckCubin(launch); !status.ok()) return status;
    auto kernel = std::make_unique<LoadedKernel>();
    kernel->name = launch.name;
    kernel->cubin = launch.cubin;
    if (Status status = Load(launch, device, kernel.get()); !status.ok()) return status;
    *found = kernel.get();
    kernels.push_back(std::move(kernel));
    return Status::Ok();
  }

 private:
  static Status Load(const KernelLaunch& launch, int device, LoadedKernel* loaded) {
    const Driver& driver = GetDriver();
    const RelaxedCapture relaxed;
    CUlibrary library = nullptr;
    CUresult error = driver.library_load(&library, loaded->cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (error == CUDA_SUCCESS) error = driver.library_get_kernel(&loaded->kernel, library, loaded->name.c_str());
    // With lazy loading a cubin for another GPU is noticed at the first request for the kernel's attributes.
    int binary_version = 0;
    if (error == CUDA_SUCCESS) {
      error = driver.kernel_get_attribute(&binary_version, CU_FUNC_ATTRIBUTE_BINARY_VERSION, loaded->kernel, device);
    }
    switch (error) {
      case CUDA_SUCCESS:
        break;
      case CUDA_ERROR_NO_BINARY_FOR_GPU:
      case CUDA_ERROR_INVALID_SOURCE:
      case CUDA_ERROR_INVALID_IMAGE:
        return Status::InvalidArgument(
            Name(launch) + "cubin: expected code for " + DeviceText(device) + ", got a cubin" +
            (launch.arch.empty() ? "" : " for " + std::string(launch.arch)) + " (" + ErrorText(error) + ")");
      case CUDA_ERROR_NOT_FOUND:
        return Status::InvalidArgument(Name(launch) + "the cubin has no kernel of this name");
      default:
        return DriverError(launch, "loading the cubin", error);
    }
    if (driver.kernel_get_param_info == nullptr) return Status::Ok();
    loaded->knows_parameters = true;
    for (size_t offset = 0, size = 0; driver.kernel_get_param_info(loaded->kernel, loaded->parameter_sizes.size(),
                                                                   &offset, &size) == CUDA_SUCCESS;) {
      loaded->parameter_sizes.push_back(size);
    }
    return Status::Ok();
  }

  std::mutex mutex_;
  std::unordered_map<size_t, std::vector<std::unique_ptr<LoadedKernel>>> kernels_;  // by the cubin's size
};

KernelCache& Cache() {
  static auto* const cache = new KernelCache;  // threads of the runtime may outlive main()
  return *cache;
}

Status CheckParameters(const KernelLaunch& launch, const LoadedKernel& kernel) {
  if (!kernel.knows_parameters) return Status::Ok();
  const size_t expected = kernel.parameter_sizes.size();
  if (launch.parameters.size() != expected) {
    return Status::InvalidArgument(Name(launch) + "arguments: expected " + std::to_string(expected) +
                                   ", as the kernel has parameters, got " + std::to_string(launch.parameters.size()));
  }
  for (size_t i = 0; i < expected; ++i) {
    if (launch.parameters[i].size == kernel.parameter_sizes[i]) continue;
    return Status::InvalidArgument(
        Name(launch) + "argument " + std::to_string(i) + ": expected " + std::to_string(kernel.parameter_sizes[i]) +
        " bytes, as the kernel's parameter, got " + std::to_string(launch.parameters[i].size));
  }
  return Status::Ok();
}

// Lets the kernel have its dynamic shared memory on this device; above 48 KiB it must be requested.
Status AllowSharedMemory(const KernelLaunch& launch, int device, LoadedKernel* kernel) {
  constexpr int64_t kWithoutAsking = 48 << 10;
  std::lock_guard<std::mutex> lock(kernel->mutex);
  const auto [allowed, first] = kernel->shared_limits.try_emplace(device, 0);
  if (first) {
    int static_bytes = 0;
    GetDriver().kernel_get_attribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel->kernel, device);
    allowed->second = kWithoutAsking - static_bytes;
  }
  if (launch.shared_bytes <= allowed->second) return Status::Ok();
  const RelaxedCapture relaxed;
  const CUresult error = GetDriver().kernel_set_attribute(
      CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(launch.shared_bytes), kernel->kernel, device);
  if (error == CUDA_ERROR_INVALID_VALUE) {
    int limit = 0, static_bytes = 0;
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    GetDriver().kernel_get_attribute(&static_bytes, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel->kernel, device);
    return Status::InvalidArgument(Name(launch) + "shared: expected at most " + std::to_string(limit - static_bytes) +
                                   " bytes on " + DeviceText(device) + ", got " + std::to_string(launch.shared_bytes));
  }
  if (error != CUDA_SUCCESS) return DriverError(launch, "allowing its dynamic shared memory", error);
  allowed->second = launch.shared_bytes;
  return Status::Ok();
}

// Clusters of more than 8 CTAs are not on every GPU, and a kernel must be allowed to use them.
Status AllowLargeCluster(const KernelLaunch& launch, int device, const LoadedKernel& kernel) {
  const RelaxedCapture relaxed;
  const CUresult error =
      GetDriver().kernel_set_attribute(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel.kernel, device);
  return error == CUDA_SUCCESS ? Status::Ok() : DriverError(launch, "allowing clusters of more than 8 CTAs", error);
}

// Waits for the kernel, and says so if it faulted.
Status WaitForKernel(const KernelLaunch& launch, Stream stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  XLA_GPU_RETURN_IF_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return Status::InvalidArgument(
        Name(launch) +
        "XLA_GPU_CHECK_INPUTS=1 cannot wait for a kernel that is captured into a CUDA graph: "
        "run outside of the capture, under XLA with the variable set when the process starts");
  }
  const cudaError_t error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) return Status::Ok();
  cudaGetLastError();
  return Status::Internal(Name(launch) + "the kernel faulted: " + cudaGetErrorName(error) + " (" +
                          cudaGetErrorString(error) + "); the process cannot use the GPU any more: start it anew");
}

}  // namespace

Status LaunchKernel(const KernelLaunch& launch, Stream stream) {
  const Driver& driver = GetDriver();
  if (!driver.complete()) {
    return Status::Internal(Name(launch) +
                            "the NVIDIA driver lacks functions of CUDA 12.0: update it (driver 525 or newer)");
  }
  int device = 0;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  LoadedKernel* kernel = nullptr;
  if (Status status = Cache().Get(launch, device, &kernel); !status.ok()) return status;
  if (Status status = CheckParameters(launch, *kernel); !status.ok()) return status;
  if (Status status = AllowSharedMemory(launch, device, kernel); !status.ok()) return status;

  CUlaunchAttribute attributes[4];
  CUlaunchConfig config = {};
  config.gridDimX = static_cast<unsigned>(launch.grid[0]);
  config.gridDimY = static_cast<unsigned>(launch.grid[1]);
  config.gridDimZ = static_cast<unsigned>(launch.grid[2]);
  config.blockDimX = static_cast<unsigned>(launch.block[0]);
  config.blockDimY = static_cast<unsigned>(launch.block[1]);
  config.blockDimZ = static_cast<unsigned>(launch.block[2]);
  config.sharedMemBytes = static_cast<unsigned>(launch.shared_bytes);
  config.hStream = stream;
  config.attrs = attributes;
  const auto add = [&](CUlaunchAttributeID id) -> CUlaunchAttributeValue& {
    CUlaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute = {};
    attribute.id = id;
    return attribute.value;
  };
  if (launch.cooperative) add(CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1;
  if (launch.pdl) {
    add(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION).programmaticStreamSerializationAllowed = 1;
  }
  const int64_t ctas_of_cluster = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  if (ctas_of_cluster > 8) {
    if (Status status = AllowLargeCluster(launch, device, *kernel); !status.ok()) return status;
  }
  if (ctas_of_cluster > 1) {
    auto& dimension = add(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim;
    dimension.x = static_cast<unsigned>(launch.cluster[0]);
    dimension.y = static_cast<unsigned>(launch.cluster[1]);
    dimension.z = static_cast<unsigned>(launch.cluster[2]);
  }
  std::vector<void*> pointers;
  pointers.reserve(launch.parameters.size());
  for (const KernelParameter& parameter : launch.parameters) {
    pointers.push_back(const_cast<uint64_t*>(&parameter.value));  // the driver only reads it
  }
  // NOTE: cuLaunchKernelEx takes a CUkernel in the place of a CUfunction, and then uses the stream's context.
  const CUresult error = driver.launch(&config, reinterpret_cast<CUfunction>(kernel->kernel), pointers.data(), nullptr);
  if (error != CUDA_SUCCESS) return DriverError(launch, "the launch", error);
  return launch.check_inputs ? WaitForKernel(launch, stream) : Status::Ok();
}

}  // namespace xla_gpu
