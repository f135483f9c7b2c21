// The combine kernel of both paths, where PathsShareCombine.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_BOTH_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_BOTH_CUH_

#include "ffi/ops/paged_attention/decode/combine.cuh"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/prefill/combine.cuh"
#include "ffi/ops/paged_attention/prefill/decode_share.cuh"

namespace xla_gpu::prefill {

// The first `decode_ctas` CTAs merge the splits of the decode path, the others those of the prefill path. Behind the
// decode path's split-KV kernel, which ends behind the prefill path's, or behind the kernel of both, with
// `prefill_ctas` CTAs; else 0.
template <int kDim>
__global__ void __maxnreg__(decode::kCombineRegisters)
    CombineBothKernel(const __grid_constant__ decode::DecodeArgs args, const __grid_constant__ SplitKvPolicy policy,
                      const __grid_constant__ SplitAccumulators accumulators, unsigned decode_ctas,
                      unsigned prefill_ctas) {
  static_assert(kCombineThreads == decode::kCombineThreads);
  extern __shared__ __align__(16) char dynamic_shared[];
  if (blockIdx.x >= decode_ctas) {
    return CombinePrefillSplits<kDim, false>(args.params, policy, accumulators, blockIdx.x - decode_ctas,
                                             gridDim.x - decode_ctas);
  }
  AllowDependentLaunch();
  if (!decode::MayHaveDecodeRows(args)) return decode::ProgrammaticLaunchWait();
  using Cta = decode::VaryingCombineCta;
  static_assert(sizeof(decode::CombineSharedStorage<Cta>) == sizeof(decode::CombineSharedStorage<>));
  auto& storage = *reinterpret_cast<decode::CombineSharedStorage<Cta>*>(dynamic_shared);
  int cta_groups = args.num_cta_groups;
  if (prefill_ctas > 0) {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const auto metadata = ThreadMetadata::Load(args.params, lane, /*early=*/false);
    cta_groups = DecodeShare::Of(args, policy, metadata, prefill_ctas).cta_groups;
  }
  decode::CombineCta<kDim, Cta>(args, storage, decode_ctas, cta_groups).Run();
}

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_COMBINE_BOTH_CUH_
