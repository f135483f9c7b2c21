// The handler table.
#include <cstddef>

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

}  // namespace

extern "C" const xla_gpu_handler* xla_gpu_handlers(size_t* count) {
  if (count != nullptr) *count = sizeof kHandlers / sizeof kHandlers[0];
  return kHandlers;
}
