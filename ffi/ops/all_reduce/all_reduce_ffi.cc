// all_reduce and all_reduce_add_rms_norm: checks and bindings of the host and CUDA handlers.
//
// The attribute `group` is a device group's number, or 0: then x has one more dimension in front, the ranks, whose
// parts XLA gathered. The host has no other way.
#include <algorithm>
#include <cmath>

#include "ffi/device/host_copy.h"
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/all_reduce/all_reduce.h"
#include "ffi/runtime/device_groups.h"

namespace xla_gpu {
namespace {

constexpr char kAllReduce[] = "all_reduce";
constexpr char kAddRmsNorm[] = "all_reduce_add_rms_norm";

// x of `like`'s shape with a group, else with the ranks in front, which are read.
ffi::Error GetParts(const char* op, const ffi::AnyBuffer& x, const char* like_name, const ffi::AnyBuffer& like,
                    bool gathered, int64_t* ranks) {
  *ranks = 1;
  if (!gathered) return CheckSame(op, like_name, like, "x", x);
  auto dims = x.dimensions();
  const auto expected = like.dimensions();
  if (x.element_type() != like.element_type() || dims.size() != expected.size() + 1 || dims[0] < 1 ||
      !std::equal(expected.begin(), expected.end(), dims.begin() + 1)) {
    return Mismatch(op, "x",
                    StrCat("the parts of at least one rank, ", DTypeText(like.element_type()), " [ranks] + ",
                           ShapeText(expected), " (as ", like_name, ")"),
                    StrCat(DTypeText(x.element_type()), " ", ShapeText(dims)));
  }
  *ranks = dims[0];
  return ffi::Error::Success();
}

ffi::Error CheckNoGroup(const char* op, int64_t group) {
  if (group == 0) return ffi::Error::Success();
  return Mismatch(op, "group", "0 on the host, where the parts are gathered", std::to_string(group));
}

ffi::Error GetParams(const ffi::AnyBuffer& x, const ffi::AnyBuffer& out, bool gathered, AllReduceParams* params) {
  AllReduceParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kAllReduce, "x", x, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(GetParts(kAllReduce, x, "out", out, gathered, &p.ranks));
  p.x = x.untyped_data();
  p.out = out.untyped_data();
  p.size = static_cast<int64_t>(out.element_count());
  p.group = nullptr;
  return ffi::Error::Success();
}

struct NormOperands {
  const ffi::AnyBuffer &x, &residual, &weight, &out, &sum;
};

ffi::Error GetParams(const NormOperands& o, float eps, bool gathered, AllReduceAddRmsNormParams* params) {
  AllReduceAddRmsNormParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kAddRmsNorm, "x", o.x, &p.dtype));
  if (o.residual.dimensions().size() < 1) {
    return Mismatch(kAddRmsNorm, "residual", "rank 1 or more, [..., hidden]", "rank 0");
  }
  XLA_GPU_RETURN_IF_ERROR(GetParts(kAddRmsNorm, o.x, "residual", o.residual, gathered, &p.ranks));
  auto dims = o.residual.dimensions();
  p.hidden = dims[dims.size() - 1];
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kAddRmsNorm, "weight", o.weight, o.residual.element_type()));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kAddRmsNorm, "weight", o.weight, {p.hidden}));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kAddRmsNorm, "out", o.out, "residual", o.residual));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kAddRmsNorm, "sum", o.sum, "residual", o.residual));
  if (!std::isfinite(eps) || eps < 0.0f) return Mismatch(kAddRmsNorm, "eps", "a finite number >= 0", StrCat(eps));
  p.x = o.x.untyped_data();
  p.residual = o.residual.untyped_data();
  p.weight = o.weight.untyped_data();
  p.out = o.out.untyped_data();
  p.sum = o.sum.untyped_data();
  p.num_rows = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) p.num_rows *= dims[i];
  p.eps = eps;
  p.group = nullptr;
  return ffi::Error::Success();
}

ffi::Error AllReduceHost(CallContext context, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, int64_t group,
                         bool /*check_inputs*/) {
  return NoThrow(kAllReduce, [&]() -> ffi::Error {
    AllReduceParams params;
    XLA_GPU_RETURN_IF_ERROR(CheckNoGroup(kAllReduce, group));
    XLA_GPU_RETURN_IF_ERROR(GetParams(x, *out, /*gathered=*/true, &params));
    return ToError(RunAllReduce(params, XlaExecutor(context)));
  });
}

ffi::Error AddRmsNormHost(CallContext context, ffi::AnyBuffer x, ffi::AnyBuffer residual, ffi::AnyBuffer weight,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> sum, int64_t group, float eps,
                          bool /*check_inputs*/) {
  return NoThrow(kAddRmsNorm, [&]() -> ffi::Error {
    AllReduceAddRmsNormParams params;
    XLA_GPU_RETURN_IF_ERROR(CheckNoGroup(kAddRmsNorm, group));
    XLA_GPU_RETURN_IF_ERROR(GetParams({x, residual, weight, *out, *sum}, eps, /*gathered=*/true, &params));
    return ToError(RunAllReduceAddRmsNorm(params, XlaExecutor(context)));
  });
}

#ifdef XLA_GPU_WITH_CUDA
// Runs `launch` with the group of the current device; with `check_inputs` waits for it and reports a time-out.
template <typename Params, typename Launch>
ffi::Error OnCuda(const char* op, Params params, int64_t group, bool check_inputs, Stream stream, Launch launch) {
  if (group == 0) return ToError(launch(params, stream));
  int device = -1;
  XLA_GPU_RETURN_IF_ERROR(ToError(CurrentDevice(&device)));
  XLA_GPU_RETURN_IF_ERROR(ToError(FindGroup(op, group, device, &params.group)));
  XLA_GPU_RETURN_IF_ERROR(ToError(launch(params, stream)));
  if (!check_inputs) return ffi::Error::Success();
  XLA_GPU_RETURN_IF_ERROR(ToError(WaitForStream(stream)));
  return ToError(FindGroup(op, group, device, &params.group));
}

ffi::Error AllReduceCuda(CallContext context, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out, int64_t group,
                         bool check_inputs) {
  return NoThrow(kAllReduce, [&]() -> ffi::Error {
    AllReduceParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(x, *out, /*gathered=*/group == 0, &params));
    return OnCuda(kAllReduce, params, group, check_inputs, context.stream(), LaunchAllReduce);
  });
}

ffi::Error AddRmsNormCuda(CallContext context, ffi::AnyBuffer x, ffi::AnyBuffer residual, ffi::AnyBuffer weight,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> sum, int64_t group, float eps,
                          bool check_inputs) {
  return NoThrow(kAddRmsNorm, [&]() -> ffi::Error {
    AllReduceAddRmsNormParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams({x, residual, weight, *out, *sum}, eps, /*gathered=*/group == 0, &params));
    return OnCuda(kAddRmsNorm, params, group, check_inputs, context.stream(), LaunchAllReduceAddRmsNorm);
  });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_ALL_REDUCE_SIGNATURE      \
       Arg<ffi::AnyBuffer>()  /* x */     \
      .Ret<ffi::AnyBuffer>()  /* out */   \
      .Attr<int64_t>("group")             \
      .Attr<bool>("check_inputs")

#define XLA_GPU_ALL_REDUCE_ADD_RMS_NORM_SIGNATURE  \
       Arg<ffi::AnyBuffer>()  /* x */              \
      .Arg<ffi::AnyBuffer>()  /* residual */       \
      .Arg<ffi::AnyBuffer>()  /* weight */         \
      .Ret<ffi::AnyBuffer>()  /* out */            \
      .Ret<ffi::AnyBuffer>()  /* sum */            \
      .Attr<int64_t>("group")                      \
      .Attr<float>("eps")                          \
      .Attr<bool>("check_inputs")
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_all_reduce_host, AllReduceHost, XLA_GPU_BIND().XLA_GPU_ALL_REDUCE_SIGNATURE);
XLA_GPU_DEFINE_HANDLER(xla_gpu_all_reduce_add_rms_norm_host, AddRmsNormHost,
                       XLA_GPU_BIND().XLA_GPU_ALL_REDUCE_ADD_RMS_NORM_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_all_reduce_cuda, AllReduceCuda, XLA_GPU_BIND().XLA_GPU_ALL_REDUCE_SIGNATURE,
                       CaptureTraits());
XLA_GPU_DEFINE_HANDLER(xla_gpu_all_reduce_add_rms_norm_cuda, AddRmsNormCuda,
                       XLA_GPU_BIND().XLA_GPU_ALL_REDUCE_ADD_RMS_NORM_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
