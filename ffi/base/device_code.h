// The error text for a GPU that cannot run the library's code. No CUDA headers, so that it is tested without them.
#ifndef XLA_GPU_BASE_DEVICE_CODE_H_
#define XLA_GPU_BASE_DEVICE_CODE_H_

#include <string>

namespace xla_gpu {

// `architectures` as the library was built, "80-real,90a-real,90-virtual"; `major` 0 where the GPU did not tell.
inline std::string NoDeviceCodeText(const std::string& gpu, int major, int minor, const std::string& architectures) {
  std::string text = "this library has no code for ";
  text += gpu.empty() ? "this GPU" : gpu;
  if (major > 0) text += " (compute capability " + std::to_string(major) + "." + std::to_string(minor) + ")";
  text += "; it was built for " + architectures;
  if (major > 0 && major < 8) return text + ", and its kernels need compute capability 8.0 or newer: use another GPU";
  const std::string wanted = major > 0 ? std::to_string(major) + std::to_string(minor) + (major == 9 ? "a" : "") : "80";
  return text + ". Build it for this GPU: CMAKE_ARGS=-DCMAKE_CUDA_ARCHITECTURES=" + wanted + "-real pip install .";
}

}  // namespace xla_gpu

#endif  // XLA_GPU_BASE_DEVICE_CODE_H_
