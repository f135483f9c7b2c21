// silu_and_mul and gelu_and_mul: checks and bindings of the host and CUDA handlers.
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/silu_and_mul/silu_and_mul.h"

namespace xla_gpu {
namespace {

constexpr const char* NameOf(GatedActivation activation) {
  return activation == GatedActivation::kSilu ? "silu_and_mul" : "gelu_and_mul";
}

ffi::Error GetParams(const ffi::AnyBuffer& x, const ffi::AnyBuffer& out, GatedActivation activation,
                     ActivationAndMulParams* params) {
  ActivationAndMulParams& p = *params;
  const char* const op = NameOf(activation);
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(op, "x", x, &p.dtype));
  auto dims = x.dimensions();
  if (dims.size() < 1 || dims[dims.size() - 1] % 2 != 0) {
    return Mismatch(op, "x", "rank 1 or more and an even last dimension, [..., 2 * size]",
                    StrCat("shape ", ShapeText(dims)));
  }
  p.size = dims[dims.size() - 1] / 2;
  p.num_rows = 1;
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "out", out, x.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(op, "out", out, dims.size()));
  for (size_t i = 0; i < dims.size(); ++i) {
    const bool last = i + 1 == dims.size();
    if (!last) p.num_rows *= dims[i];
    if (out.dimensions()[i] != (last ? p.size : dims[i])) {
      return Mismatch(op, "out", StrCat("the shape of x ", ShapeText(dims), " with half the last dimension"),
                      StrCat("shape ", ShapeText(out.dimensions())));
    }
  }
  p.x = x.untyped_data();
  p.out = out.untyped_data();
  p.activation = activation;
  return ffi::Error::Success();
}

template <GatedActivation kActivation>
ffi::Error Host(CallContext context, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return NoThrow(NameOf(kActivation), [&]() -> ffi::Error {
    ActivationAndMulParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(x, *out, kActivation, &params));
    return ToError(RunActivationAndMul(params, XlaExecutor(context)));
  });
}

#ifdef XLA_GPU_WITH_CUDA
template <GatedActivation kActivation>
ffi::Error Cuda(CallContext context, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return NoThrow(NameOf(kActivation), [&]() -> ffi::Error {
    ActivationAndMulParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(x, *out, kActivation, &params));
    return ToError(LaunchActivationAndMul(params, context.stream()));
  });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_ACTIVATION_AND_MUL_SIGNATURE  \
       Arg<ffi::AnyBuffer>()  /* x */         \
      .Ret<ffi::AnyBuffer>()  /* out */
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_silu_and_mul_host, Host<GatedActivation::kSilu>,
                       XLA_GPU_BIND().XLA_GPU_ACTIVATION_AND_MUL_SIGNATURE);
XLA_GPU_DEFINE_HANDLER(xla_gpu_gelu_and_mul_host, Host<GatedActivation::kGeluTanh>,
                       XLA_GPU_BIND().XLA_GPU_ACTIVATION_AND_MUL_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_silu_and_mul_cuda, Cuda<GatedActivation::kSilu>,
                       XLA_GPU_BIND().XLA_GPU_ACTIVATION_AND_MUL_SIGNATURE, CaptureTraits());
XLA_GPU_DEFINE_HANDLER(xla_gpu_gelu_and_mul_cuda, Cuda<GatedActivation::kGeluTanh>,
                       XLA_GPU_BIND().XLA_GPU_ACTIVATION_AND_MUL_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
