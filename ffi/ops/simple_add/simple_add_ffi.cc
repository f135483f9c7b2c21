// simple_add: checks and bindings of the host and CUDA handlers.
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/simple_add/simple_add.h"

namespace xla_gpu {
namespace {

constexpr char kAddOp[] = "simple_add";

ffi::Error GetParams(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, const ffi::AnyBuffer& out,
                     SimpleAddParams* params) {
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kAddOp, "a", a, &params->dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kAddOp, "b", b, "a", a));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kAddOp, "out", out, "a", a));
  params->a = a.untyped_data();
  params->b = b.untyped_data();
  params->out = out.untyped_data();
  params->size = static_cast<int64_t>(a.element_count());
  return ffi::Error::Success();
}

// `run` computes on the host's threads or on a CUDA stream.
template <typename Run>
ffi::Error SimpleAdd(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, const ffi::AnyBuffer& out, Run&& run) {
  return NoThrow(kAddOp, [&]() -> ffi::Error {
    SimpleAddParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(a, b, out, &params));
    return ToError(run(params));
  });
}

ffi::Error SimpleAddHost(CallContext context, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> out) {
  return SimpleAdd(a, b, *out, [&](const auto& params) { return RunSimpleAdd(params, XlaExecutor(context)); });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error SimpleAddCuda(CallContext context, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::Result<ffi::AnyBuffer> out) {
  return SimpleAdd(a, b, *out, [&](const auto& params) { return LaunchSimpleAdd(params, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_SIMPLE_ADD_SIGNATURE       \
       Arg<ffi::AnyBuffer>()  /* a */      \
      .Arg<ffi::AnyBuffer>()  /* b */      \
      .Ret<ffi::AnyBuffer>()  /* out */
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_simple_add_host, SimpleAddHost, XLA_GPU_BIND().XLA_GPU_SIMPLE_ADD_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_simple_add_cuda, SimpleAddCuda, XLA_GPU_BIND().XLA_GPU_SIMPLE_ADD_SIGNATURE,
                       CaptureTraits());
#endif

}  // namespace xla_gpu
