// The build's description.
#include <string>

#include "ffi/host/isa.h"
#include "ffi/host/processors.h"
#include "ffi/runtime/xla_gpu.h"

namespace {

#ifdef XLA_GPU_WITH_CUDA
// "80;90a" -> ["80", "90a"]
std::string JsonList(const std::string& list) {
  std::string json = "[";
  for (size_t begin = 0; begin < list.size();) {
    size_t end = list.find_first_of(";,", begin);
    if (end == std::string::npos) end = list.size();
    if (json.size() > 1) json += ", ";
    json += "\"" + list.substr(begin, end - begin) + "\"";
    begin = end + 1;
  }
  return json + "]";
}
#endif

std::string BuildInfo() {
#ifdef XLA_GPU_WITH_CUDA
  const std::string cuda = "\"" XLA_GPU_CUDA_VERSION "\"";
  const std::string architectures = JsonList(XLA_GPU_CUDA_ARCHITECTURES);
#else
  const std::string cuda = "null";
  const std::string architectures = "[]";
#endif
#ifdef __clang__
  const std::string compiler = "clang " __clang_version__;
#else
  const std::string compiler = "gcc " __VERSION__;
#endif
  return "{\"version\": \"" XLA_GPU_VERSION "\", \"ffi_api\": [" + std::to_string(XLA_FFI_API_MAJOR) + ", " +
         std::to_string(XLA_FFI_API_MINOR) + "], \"cuda\": " + cuda + ", \"cuda_architectures\": " + architectures +
         ", \"compiler\": \"" + compiler + "\", \"host_isa\": \"" + xla_gpu::HostIsa() +
         "\", \"host_processors\": " + std::to_string(xla_gpu::UsableProcessors()) + "}";
}

}  // namespace

extern "C" const char* xla_gpu_build_info(void) {
  try {
    static const std::string info = BuildInfo();
    return info.c_str();
  } catch (...) {  // no memory
    return "{}";
  }
}
