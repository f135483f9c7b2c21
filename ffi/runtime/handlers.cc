// What the library holds: the handler table and the build's description.
#include <cstddef>
#include <string>

#include "ffi/host/isa.h"
#include "ffi/runtime/xla_gpu.h"

// xla_gpu_ops.inc holds one line XLA_GPU_OP(stem) for each operator and is written by CMake from the one list of
// operators, so that a forgotten operator cannot be missing here alone.
#define XLA_GPU_OP(op) extern "C" XLA_FFI_Error* xla_gpu_##op##_host(XLA_FFI_CallFrame*);
#include "xla_gpu_ops.inc"
#undef XLA_GPU_OP
#ifdef XLA_GPU_WITH_CUDA
#define XLA_GPU_OP(op) extern "C" XLA_FFI_Error* xla_gpu_##op##_cuda(XLA_FFI_CallFrame*);
#include "xla_gpu_ops.inc"
#undef XLA_GPU_OP
#endif

namespace {

constexpr xla_gpu_handler kHandlers[] = {
#define XLA_GPU_OP(op) {"xla_gpu_" #op, "Host", xla_gpu_##op##_host},
#include "xla_gpu_ops.inc"
#undef XLA_GPU_OP
#ifdef XLA_GPU_WITH_CUDA
#define XLA_GPU_OP(op) {"xla_gpu_" #op, "CUDA", xla_gpu_##op##_cuda},
#include "xla_gpu_ops.inc"
#undef XLA_GPU_OP
#endif
};

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
         ", \"compiler\": \"" + compiler + "\", \"host_isa\": \"" + xla_gpu::HostIsa() + "\"}";
}

}  // namespace

extern "C" const xla_gpu_handler* xla_gpu_handlers(size_t* count) {
  if (count != nullptr) *count = sizeof kHandlers / sizeof kHandlers[0];
  return kHandlers;
}

extern "C" const char* xla_gpu_build_info(void) {
  try {
    static const std::string info = BuildInfo();
    return info.c_str();
  } catch (...) {  // no memory
    return "{}";
  }
}
