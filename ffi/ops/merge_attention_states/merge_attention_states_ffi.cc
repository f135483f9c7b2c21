// merge_attention_states: checks and bindings of the host and CUDA handlers.
#include "ffi/handlers/check.h"
#include "ffi/handlers/context.h"
#include "ffi/ops/merge_attention_states/merge_attention_states.h"

namespace xla_gpu {
namespace {

constexpr char kMergeOp[] = "merge_attention_states";

ffi::Error GetParams(const ffi::AnyBuffer& out_a, const ffi::AnyBuffer& lse_a, const ffi::AnyBuffer& out_b,
                     const ffi::AnyBuffer& lse_b, const ffi::AnyBuffer& out, const ffi::AnyBuffer& lse,
                     MergeAttentionStatesParams* params) {
  MergeAttentionStatesParams& p = *params;
  XLA_GPU_RETURN_IF_ERROR(GetComputeDType(kMergeOp, "out_a", out_a, &p.dtype));
  XLA_GPU_RETURN_IF_ERROR(CheckRank(kMergeOp, "out_a", out_a, 3));
  auto dims = out_a.dimensions();
  XLA_GPU_RETURN_IF_ERROR(CheckDType(kMergeOp, "lse_a", lse_a, ffi::DataType::F32));
  XLA_GPU_RETURN_IF_ERROR(CheckShape(kMergeOp, "lse_a", lse_a, {dims[0], dims[1]}));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kMergeOp, "out_b", out_b, "out_a", out_a));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kMergeOp, "lse_b", lse_b, "lse_a", lse_a));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kMergeOp, "out", out, "out_a", out_a));
  XLA_GPU_RETURN_IF_ERROR(CheckSame(kMergeOp, "lse", lse, "lse_a", lse_a));
  p.out_a = out_a.untyped_data();
  p.lse_a = static_cast<const float*>(lse_a.untyped_data());
  p.out_b = out_b.untyped_data();
  p.lse_b = static_cast<const float*>(lse_b.untyped_data());
  p.out = out.untyped_data();
  p.lse = static_cast<float*>(lse.untyped_data());
  p.num_rows = dims[0] * dims[1];
  p.head_dim = dims[2];
  return ffi::Error::Success();
}

// `run` computes on the host's threads or on a CUDA stream.
template <typename Run>
ffi::Error Merge(const ffi::AnyBuffer& out_a, const ffi::AnyBuffer& lse_a, const ffi::AnyBuffer& out_b,
                 const ffi::AnyBuffer& lse_b, const ffi::AnyBuffer& out, const ffi::AnyBuffer& lse, Run&& run) {
  return NoThrow(kMergeOp, [&]() -> ffi::Error {
    MergeAttentionStatesParams params;
    XLA_GPU_RETURN_IF_ERROR(GetParams(out_a, lse_a, out_b, lse_b, out, lse, &params));
    return ToError(run(params));
  });
}

ffi::Error MergeAttentionStatesHost(CallContext context, ffi::AnyBuffer out_a, ffi::AnyBuffer lse_a,
                                    ffi::AnyBuffer out_b, ffi::AnyBuffer lse_b, ffi::Result<ffi::AnyBuffer> out,
                                    ffi::Result<ffi::AnyBuffer> lse) {
  return Merge(out_a, lse_a, out_b, lse_b, *out, *lse,
               [&](const auto& params) { return RunMergeAttentionStates(params, XlaExecutor(context)); });
}

#ifdef XLA_GPU_WITH_CUDA
ffi::Error MergeAttentionStatesCuda(CallContext context, ffi::AnyBuffer out_a, ffi::AnyBuffer lse_a,
                                    ffi::AnyBuffer out_b, ffi::AnyBuffer lse_b, ffi::Result<ffi::AnyBuffer> out,
                                    ffi::Result<ffi::AnyBuffer> lse) {
  return Merge(out_a, lse_a, out_b, lse_b, *out, *lse,
               [&](const auto& params) { return LaunchMergeAttentionStates(params, context.stream()); });
}
#endif

}  // namespace

// clang-format off
#define XLA_GPU_MERGE_ATTENTION_STATES_SIGNATURE  \
       Arg<ffi::AnyBuffer>()  /* out_a */         \
      .Arg<ffi::AnyBuffer>()  /* lse_a */         \
      .Arg<ffi::AnyBuffer>()  /* out_b */         \
      .Arg<ffi::AnyBuffer>()  /* lse_b */         \
      .Ret<ffi::AnyBuffer>()  /* out */           \
      .Ret<ffi::AnyBuffer>()  /* lse */
// clang-format on

XLA_GPU_DEFINE_HANDLER(xla_gpu_merge_attention_states_host, MergeAttentionStatesHost,
                       XLA_GPU_BIND().XLA_GPU_MERGE_ATTENTION_STATES_SIGNATURE);
#ifdef XLA_GPU_WITH_CUDA
XLA_GPU_DEFINE_HANDLER(xla_gpu_merge_attention_states_cuda, MergeAttentionStatesCuda,
                       XLA_GPU_BIND().XLA_GPU_MERGE_ATTENTION_STATES_SIGNATURE, CaptureTraits());
#endif

}  // namespace xla_gpu
