// rms_norm: checks and bindings of the host and CUDA handlers.
//
// With has_residual a third operand, residual, and a second result, sum.
#include "ffi/ops/rms_norm/rms_norm_ffi.h"

#include <cmath>

#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/rms_norm/rms_norm.h"

namespace xla_gpu {
namespace {

constexpr char kRmsNormOp[] = "rms_norm";

struct RmsNormAttributes {
  NormAttributes norm;
  bool has_residual;
};

ffi::Error GetParams(const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight, const ffi::RemainingArgs& rest,
                     const ffi::AnyBuffer& out, const ffi::RemainingRets& rets, const RmsNormAttributes& attributes,
                     RmsNormParams* params) {
  RmsNormParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kRmsNormOp, "x", x, &p.dtype));
  auto dims = x.dimensions();
  if (dims.size() < 1) return Mismatch(kRmsNormOp, "x", "rank 1 or more, [..., size]", "rank 0");
  p.size = dims[dims.size() - 1];
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kRmsNormOp, "weight", weight, x.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kRmsNormOp, "weight", weight, {p.size}));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kRmsNormOp, "out", out, "x", x));
  const size_t more = attributes.has_residual ? 1 : 0;
  if (rest.size() != more)
    return Mismatch(kRmsNormOp, "operands", StrCat(2 + more, " for these attributes"), StrCat(2 + rest.size()));
  if (rets.size() != more)
    return Mismatch(kRmsNormOp, "results", StrCat(1 + more, " for these attributes"), StrCat(1 + rets.size()));
  p.residual = p.sum = nullptr;
  if (attributes.has_residual) {
    const auto residual = *rest.get<ffi::AnyBuffer>(0);
    XLA_GPU_RETURN_IF_ERROR(CheckSame(kRmsNormOp, "residual", residual, "x", x));
    ffi::Result<ffi::AnyBuffer> sum = *rets.get<ffi::AnyBuffer>(0);
    XLA_GPU_RETURN_IF_ERROR(CheckSame(kRmsNormOp, "sum", *sum, "x", x));
    p.residual = residual.untyped_data();
    p.sum = sum->untyped_data();
  }
  XLA_GPU_RETURN_IF_ERROR(GetNormAttributes(kRmsNormOp, attributes.norm, &p));
  p.x = x.untyped_data();
  p.weight = weight.untyped_data();
  p.out = out.untyped_data();
  p.num_rows = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) p.num_rows *= dims[i];
  return ffi::Error::Success();
}

}  // namespace

ffi::Error GetNormAttributes(const char* op, const NormAttributes& attributes, RmsNormParams* params) {
  if (!std::isfinite(attributes.eps) || attributes.eps < 0.0f) {
    return Mismatch(op, "eps", "a finite number >= 0", StrCat(attributes.eps));
  }
  if (!std::isfinite(attributes.weight_offset)) {
    return Mismatch(op, "weight_offset", "a finite number", StrCat(attributes.weight_offset));
  }
  params->eps = attributes.eps;
  params->weight_offset = attributes.weight_offset;
  params->round_once = attributes.round_once;
  return ffi::Error::Success();
}

ffi::Error GetNorm(const char* op, const ffi::AnyBuffer& x, const std::optional<ffi::AnyBuffer>& norm_weight,
                   const NormAttributes& attributes, RmsNormParams* params) {
  RmsNormParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetNormAttributes(op, attributes, params));
  p.weight = nullptr;
  if (!norm_weight) return ffi::Error::Success();
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(op, "x", x, &p.dtype));
  auto dims = x.dimensions();
  p.size = dims[dims.size() - 1];
  p.num_rows = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) p.num_rows *= dims[i];
  XLA_GPU_RETURN_IF_ERROR(CheckDType(op, "norm_weight", *norm_weight, x.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(op, "norm_weight", *norm_weight, {p.size}));
  p.x = x.untyped_data();
  p.weight = norm_weight->untyped_data();
  return ffi::Error::Success();
}

namespace {

ffi::Error RmsNormHost(CallContext context, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets rets, float eps, float weight_offset,
                       bool round_once, bool has_residual) {
  return NoThrow(kRmsNormOp, [&]() -> ffi::Error {
    RmsNormParams params;
    XLA_GPU_RETURN_IF_ERROR(
        GetParams(x, weight, rest, *out, rets, {{eps, weight_offset, round_once}, has_residual}, &params));
    return ToError(RunRmsNorm(params, XlaExecutor(context)));
  });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error RmsNormCuda(CallContext context, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::RemainingArgs rest,
                       ffi::Result<ffi::AnyBuffer> out, ffi::RemainingRets rets, float eps, float weight_offset,
                       bool round_once, bool has_residual) {
  return NoThrow(kRmsNormOp, [&]() -> ffi::Error {
    RmsNormParams params;
    XLA_GPU_RETURN_IF_ERROR(
        GetParams(x, weight, rest, *out, rets, {{eps, weight_offset, round_once}, has_residual}, &params));
    return ToError(LaunchRmsNorm(params, context.stream()));
  });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_RMS_NORM_SIGNATURE          \
       Arg<ffi::AnyBuffer>()  /* x */       \
      .Arg<ffi::AnyBuffer>()  /* weight */  \
      .RemainingArgs()        /* residual */ \
      .Ret<ffi::AnyBuffer>()  /* out */     \
      .RemainingRets()        /* sum */     \
      .Attr<float>("eps")                   \
      .Attr<float>("weight_offset")         \
      .Attr<bool>("round_once")             \
      .Attr<bool>("has_residual")
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_rms_norm_host, RmsNormHost, XLA_GPU_BIND().XLA_GPU_RMS_NORM_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_rms_norm_cuda, RmsNormCuda, XLA_GPU_BIND().XLA_GPU_RMS_NORM_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
