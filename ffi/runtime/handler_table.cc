// The handler table.
#include <cstddef>

#include "ffi/runtime/xla_gpu.h"

// xla_gpu_ops.inc holds one line XLA_GPU_OP(name, scratch_bytes) for each handler, and one line
// XLA_GPU_SCRATCH(scratch_bytes) for each handler with scratch memory. CMake writes it from the operators' lists, so
// that an operator is listed once.
#define XLA_GPU_OP(name, scratch_bytes) extern "C" XLA_FFI_Error* xla_gpu_##name##_host(XLA_FFI_CallFrame*);
#define XLA_GPU_SCRATCH(scratch_bytes) extern "C" XLA_FFI_Error* scratch_bytes(XLA_FFI_CallFrame*);
#include "xla_gpu_ops.inc"
#undef XLA_GPU_SCRATCH
#define XLA_GPU_SCRATCH(scratch_bytes)
#undef XLA_GPU_OP
#ifdef XLA_GPU_WITH_CUDA
#define XLA_GPU_OP(name, scratch_bytes) extern "C" XLA_FFI_Error* xla_gpu_##name##_cuda(XLA_FFI_CallFrame*);
#include "xla_gpu_ops.inc"
#undef XLA_GPU_OP
#endif

namespace {

constexpr xla_gpu_handler kHandlers[] = {
#define XLA_GPU_OP(name, scratch_bytes) {"xla_gpu_" #name, "Host", xla_gpu_##name##_host, scratch_bytes},
#include "xla_gpu_ops.inc"
#undef XLA_GPU_OP
#ifdef XLA_GPU_WITH_CUDA
#define XLA_GPU_OP(name, scratch_bytes) {"xla_gpu_" #name, "CUDA", xla_gpu_##name##_cuda, scratch_bytes},
#include "xla_gpu_ops.inc"
#undef XLA_GPU_OP
#endif
};

}  // namespace

extern "C" const xla_gpu_handler* xla_gpu_handlers(size_t* count) {
  if (count != nullptr) *count = sizeof kHandlers / sizeof kHandlers[0];
  return kHandlers;
}
