// accumulate: checks and bindings of the host handler, and of the handler that computes its scratch memory.
#include <cstring>

#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/accumulate/accumulate.h"

namespace xla_gpu {
namespace {

constexpr char kOp[] = "accumulate";

ffi::Error GetOperands(const ffi::AnyBuffer& x, const ffi::AnyBuffer& total, AccumulateParams* params) {
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kOp, "x", x, ffi::DataType::F32));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kOp, "x", x, 1));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kOp, "total", total, "x", x));
  params->x = static_cast<const float*>(x.untyped_data());
  params->size = x.dimensions()[0];
  return ffi::Error::Success();
}

int64_t ScratchBytes(const AccumulateParams& params) { return params.size * int64_t{sizeof(float)}; }

ffi::Error AccumulateHost(CallContext context, ffi::AnyBuffer x, ffi::AnyBuffer total, ffi::Result<ffi::AnyBuffer> out,
                          ffi::Result<ffi::AnyBuffer> scratch, float scale) {
  return NoThrow(kOp, [&]() -> ffi::Error {
    AccumulateParams params;
    XLA_GPU_RETURN_IF_ERROR(GetOperands(x, total, &params));
    XLA_GPU_RETURN_IF_ERROR(CheckSame(kOp, "out", *out, "total", total));
    XLA_GPU_RETURN_IF_ERROR(CheckDType(kOp, "scratch", *scratch, ffi::DataType::U8));
    XLA_GPU_RETURN_IF_ERROR(CheckShape(kOp, "scratch", *scratch, {ScratchBytes(params)}));
    params.total = static_cast<float*>(out->untyped_data());
    params.scratch = scratch->untyped_data();
    params.scale = scale;
    if (out->untyped_data() != total.untyped_data() && total.size_bytes() > 0) {
      std::memcpy(out->untyped_data(), total.untyped_data(), total.size_bytes());
    }
    return ToError(RunAccumulate(params, XlaExecutor(context)));
  });
}

ffi::Error AccumulateScratch(ffi::AnyBuffer x, ffi::AnyBuffer total, ffi::Result<ffi::BufferR0<ffi::S64>> bytes,
                             float) {
  return NoThrow(kOp, [&]() -> ffi::Error {
    AccumulateParams params;
    XLA_GPU_RETURN_IF_ERROR(GetOperands(x, total, &params));
    *bytes->typed_data() = ScratchBytes(params);
    return ffi::Error::Success();
  });
}

}  // namespace

// clang-format off
#define XLA_GPU_ACCUMULATE_OPERANDS            \
       Arg<ffi::AnyBuffer>()     /* x */       \
      .Arg<ffi::AnyBuffer>()     /* total */

XLA_GPU_DEFINE_HANDLER(xla_gpu_accumulate_host, AccumulateHost,
                       XLA_GPU_BIND().XLA_GPU_ACCUMULATE_OPERANDS
                           .Ret<ffi::AnyBuffer>()    /* out */
                           .Ret<ffi::AnyBuffer>()    /* scratch */
                           .Attr<float>("scale"));
XLA_GPU_DEFINE_SCRATCH(xla_gpu_accumulate_scratch_bytes, AccumulateScratch,
                       ffi::Ffi::Bind().XLA_GPU_ACCUMULATE_OPERANDS
                           .Ret<ffi::BufferR0<ffi::S64>>()
                           .Attr<float>("scale"));
// clang-format on

}  // namespace xla_gpu
