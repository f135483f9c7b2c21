// The launches of the decode kernels, and the combine kernels.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "ffi/base/cuda_status.h"
#include "ffi/device/async_copy.cuh"
#include "ffi/ops/paged_attention/decode/combine.cuh"
#include "ffi/ops/paged_attention/decode/combine_small.cuh"
#include "ffi/ops/paged_attention/decode/formats.h"
#include "ffi/ops/paged_attention/decode/launch.h"
#include "ffi/ops/paged_attention/decode/occupancy.h"
#include "ffi/ops/paged_attention/decode/traits.cuh"
#include "ffi/ops/paged_attention/prefill/heuristics.h"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::decode {
namespace {

// The combine kernels for one bound of head_dim.
struct CombineKernels {
  void (*combine)(DecodeArgs);
  void (*combine_small)(DecodeArgs);
};

CombineKernels CombineKernelsFor(int head_dim) {
  if (head_dim <= 128) return {DecodeCombineKernel<128>, DecodeCombineSmallKernel<128>};
  return {DecodeCombineKernel<256>, DecodeCombineSmallKernel<256>};
}

Status QueryOccupancy(const SplitKvVariants& variants, const CombineKernels& combine, int device,
                      Occupancy* occupancy) {
  constexpr int kCombineBytes = static_cast<int>(sizeof(CombineSharedStorage<>));
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, combine.combine));
  occupancy->dependent = code.ptxVersion >= 90;
  occupancy->large_shared_memory = HasLargeSharedMemory(code.ptxVersion * 10);
  const SplitKvKernel& split_kv = occupancy->large_shared_memory ? variants.large : variants.small;
  int sms, bytes_per_cta, ctas;
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&bytes_per_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const int bytes = std::max(split_kv.shared_bytes, kCombineBytes);
  if (bytes > bytes_per_cta) {
    return Status::Internal("paged_attention: this head_dim needs " + std::to_string(bytes) +
                            " bytes of shared memory in a block, and the GPU has " + std::to_string(bytes_per_cta));
  }
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(split_kv.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, split_kv.shared_bytes));
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(combine.combine, cudaFuncAttributeMaxDynamicSharedMemorySize, kCombineBytes));
  XLA_GPU_RETURN_IF_CUDA(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, split_kv.kernel, split_kv.threads, split_kv.shared_bytes));
  occupancy->sms = sms;
  occupancy->ctas = std::min(sms, kMaxSms) * std::clamp(ctas, 1, kCtasPerSm);
  // All kernels ask for the same carveout: an SM cannot change it while CTAs of another kernel are resident.
  for (const auto kernel : {split_kv.kernel, combine.combine, combine.combine_small}) {
    XLA_GPU_RETURN_IF_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  }
  return Status::Ok();
}

// The occupancy on the current device, looked up once.
Status GetOccupancy(const SplitKvVariants& variants, const CombineKernels& combine, Occupancy* occupancy) {
  int device;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  if (FindOccupancy(variants.large.kernel, device, occupancy)) return Status::Ok();
  if (Status status = QueryOccupancy(variants, combine, device, occupancy); !status.ok()) return status;
  StoreOccupancy(variants.large.kernel, device, *occupancy);
  return Status::Ok();
}

// Whether CTAs may start beside the prefill path's last work tiles, of 192 rows, long before the others
// (TileScheduler::SetLead). Of other instances it was not seen to gain.
bool TakesLead(const PagedAttentionCall& params, const DecodeArgs& args, int sms) {
  constexpr int64_t kManySequences = 32;  // which CTAs measure together
  return args.behind_prefill && params.max_seqs > kManySequences && params.head_dim == 128 &&
         params.page_size % 8 == 0 && !IsFloat8(params.cache_dtype) && args.block_shift == 0 &&
         prefill::TmaInstanceDim128(params, prefill::SplitKvPolicy::Make(params), /*one_warpgroup=*/true, sms) ==
             prefill::TmaInstance::kRows192;
}

DecodeArgs ArgsFor(const PagedAttentionCall& params, const KernelConfig& config, const SplitKvKernel& kernel,
                   const Occupancy& occupancy) {
  DecodeArgs args = MakeArgs(params, config);
  args.kv_l2_policy = kEvictFirst;
  args.slot_stride_bytes = static_cast<uint32_t>(params.slot_stride * kernel.element_bytes);
  args.block_keys_log2 = static_cast<uint8_t>(kernel.block_keys_log2);
  args.tile_rows_log2 = static_cast<uint8_t>(kernel.tile_rows_log2);
  PartitionWork(config, occupancy.ctas, &args);
  args.prompt_sms = TakesLead(params, args, occupancy.sms) ? occupancy.sms : 0;
  // Not behind the prefill path, which has waited for everything before it, unless that uses the same scratch.
  args.wait_at_start = !args.behind_prefill || PathsShareScratch(params);
  args.whole_tile_excess = WholeTileExcess(config, args);
  return args;
}

// A warp for each row of a split tile. There is at most one split tile for each boundary between intervals, and for
// each work tile of a KV-head group.
unsigned CombineCtas(const PagedAttentionCall& params, const KernelConfig& config, const DecodeArgs& args, int sms) {
  const int64_t tile_rows = int64_t{args.cta_group_size} * config.accum_rows;
  const int64_t rows = std::min<int64_t>(args.num_cta_groups - 1, config.work_tiles / args.cta_group_size) * tile_rows;
  // Where the prefill path follows, one CTA on each SM leaves registers for a small prefill CTA. Not where a warp would
  // then merge more than one row: a second one takes as long as the first.
  const bool one_turn = rows <= int64_t{sms} * kCombineWarps;
  const bool leave_room = one_turn && !args.fill_padding_rows && DecodeComesFirst(params);
  const int64_t most = int64_t{sms} * (leave_room ? 1 : 2);
  return static_cast<unsigned>(std::clamp<int64_t>(rows, 1, most));
}

// What the split-KV kernel's launch and the combine kernel's behind it have in common.
cudaLaunchConfig_t DependentLaunch(Stream stream, const Occupancy& occupancy, cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute->val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.stream = stream;
  launch.attrs = attribute;
  launch.numAttrs = occupancy.dependent ? 1 : 0;
  return launch;
}

}  // namespace

Status LaunchKernels(const PagedAttentionCall& params, const KernelConfig& config, const SplitKvVariants& variants,
                     Stream stream) {
  const CombineKernels combine_kernels = CombineKernelsFor(config.head_dim);
  Occupancy occupancy;
  if (Status status = GetOccupancy(variants, combine_kernels, &occupancy); !status.ok()) return status;
  const SplitKvKernel& kernel = occupancy.large_shared_memory ? variants.large : variants.small;
  if (config.wide && !occupancy.large_shared_memory) return LaunchSimt(params, stream);
  const DecodeArgs args = ArgsFor(params, config, kernel, occupancy);
  const unsigned combine_ctas = CombineCtas(params, config, args, occupancy.sms);
  SharedCall* const shared = params.decode_work;
  if (shared != nullptr && !shared->planned) {
    // The prefill path's kernel has code for work tiles of 8 rows.
    const bool suits = config.row_tiles == 1 && kernel.element_bytes == 2 && config.head_dim == 128;
    *shared = {/*planned=*/true, suits, /*launched=*/false, /*combines=*/!config.whole_tiles, args,
               combine_ctas};
    return Status::Ok();
  }

  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t split_kv = DependentLaunch(stream, occupancy, &attribute);
  split_kv.gridDim = dim3(static_cast<unsigned>(args.cta_group_size), static_cast<unsigned>(args.num_cta_groups));
  split_kv.blockDim = dim3(static_cast<unsigned>(kernel.threads));
  split_kv.dynamicSmemBytes = static_cast<size_t>(kernel.shared_bytes);
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&split_kv, kernel.kernel, args));
  if (config.whole_tiles || shared != nullptr) return Status::Ok();

  cudaLaunchConfig_t combine = DependentLaunch(stream, occupancy, &attribute);
  if (args.store_every_split) {
    combine.gridDim = dim3(static_cast<unsigned>(config.work_tiles * config.accum_rows));
    combine.blockDim = dim3(kCombineSmallThreads);
    XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&combine, combine_kernels.combine_small, args));
    return Status::Ok();
  }
  combine.gridDim = dim3(combine_ctas);
  combine.blockDim = dim3(kCombineThreads);
  combine.dynamicSmemBytes = sizeof(CombineSharedStorage<>);
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&combine, combine_kernels.combine, args));
  return Status::Ok();
}

Status LaunchCombine(const SharedCall& call, Stream stream) {
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(call.combine_ctas);
  launch.blockDim = dim3(kCombineThreads);
  launch.dynamicSmemBytes = sizeof(CombineSharedStorage<>);
  launch.stream = stream;
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&launch, CombineKernelsFor(128).combine, call.args));
  return Status::Ok();
}

}  // namespace xla_gpu::decode
