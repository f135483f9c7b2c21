// Launches of the decode kernels for one cache format. Each format has its own source file, for the compiler's time.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LAUNCH_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>

#include "ffi/base/cuda_status.h"
#include "ffi/ops/paged_attention/decode/combine.cuh"
#include "ffi/ops/paged_attention/decode/combine_small.cuh"
#include "ffi/ops/paged_attention/decode/formats.h"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/decode/split_kv_kernel.cuh"

namespace xla_gpu::decode {

// How the kernels of a shape are launched on a device.
struct Residency {
  bool known = false;
  int sms = 0;
  int workers = 0;    // blocks of the split kernel that are resident at a time
  bool deep = false;  // the device's code is for deep shapes, else for the others: the rest is known of those alone
  bool dependent = false;  // the kernels' code is for sm_90 or above: the second may begin before the first ends
};

template <typename S>
inline constexpr auto kCombineKernelOf = DecodeCombineKernel<S::kDim, S::kBlockKeys, S::kRows>;
template <typename S>
inline constexpr auto kCombineFewKernelOf = DecodeCombineFewKernel<S::kDim, S::kBlockKeys, S::kRows>;

template <typename S>
Status FindResidency(int device, Residency* residency) {
  constexpr int kSplitBytes = static_cast<int>(sizeof(SplitShared<S>));
  constexpr int kCombineBytes = static_cast<int>(sizeof(CombineShared<S::kBlockKeys, S::kRows>));
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, kCombineKernelOf<S>));
  residency->dependent = code.ptxVersion >= 90;
  residency->deep = CodeIsDeep(code.ptxVersion * 10);
  if (residency->deep != S::kDeep) {
    residency->known = true;
    return Status::Ok();
  }
  int sms, per_block, blocks;
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (std::max(kSplitBytes, kCombineBytes) > per_block) {
    return Status::Internal("paged_attention: this head_dim needs " +
                            std::to_string(std::max(kSplitBytes, kCombineBytes)) +
                            " bytes of shared memory in a block, and the GPU has " + std::to_string(per_block));
  }
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(DecodeSplitKernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSplitBytes));
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kCombineKernelOf<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, kCombineBytes));
  XLA_GPU_RETURN_IF_CUDA(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, DecodeSplitKernel<S>, S::kThreads, kSplitBytes));
  residency->sms = sms;
  residency->workers = std::min(sms, kMaxSms) * std::clamp(blocks, 1, kDecodeBlocksPerSm);
  // All want the same of L1 as shared memory: an SM does not change it while it is busy.
  for (const auto kernel : {DecodeSplitKernel<S>, kCombineKernelOf<S>, kCombineFewKernelOf<S>}) {
    XLA_GPU_RETURN_IF_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  }
  residency->known = true;
  return Status::Ok();
}

// The current device's, looked up once.
template <typename S>
Status GetResidency(Residency* residency) {
  constexpr int kMaxDevices = 64;
  static std::mutex mutex;
  static std::array<Residency, kMaxDevices> known;
  int device;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  if (device >= kMaxDevices) return FindResidency<S>(device, residency);
  const std::lock_guard<std::mutex> lock(mutex);
  if (!known[device].known) {
    if (Status status = FindResidency<S>(device, &known[device]); !status.ok()) return status;
  }
  *residency = known[device];
  return Status::Ok();
}

template <typename S>
Status LaunchShape(const PagedAttentionParams& params, const Layout& layout, Stream stream) {
  Residency residency;
  if (Status status = GetResidency<S>(&residency); !status.ok()) return status;
  DecodeArgs args = MakeArgs(params, layout);
  args.stream_policy = kEvictFirst;
  args.slot_bytes = static_cast<uint32_t>(params.slot_stride * S::kElementBytes);
  ShareOut(layout, S::kBlockKeys, residency.workers, &args);
  // Not behind the prefill path, which has waited for all that came before.
  args.wait_first = params.num_tokens <= kMaxDecodeRows || DecodeComesFirst(params);

  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  if (args.few) {
    config.gridDim = dim3(static_cast<unsigned>(layout.units * layout.slot_rows));
    config.blockDim = dim3(kCombineFewThreads);
  } else {
    // At most so many rows are to be merged, each by a warp: of a unit for each boundary between teams.
    const int64_t rows = std::min<int64_t>(args.teams - 1, layout.units) * args.heads * layout.slot_rows;
    // Where the prefill path comes behind, one block on each SM, which leaves registers for a small one of its.
    const bool leave_room = params.num_tokens > kMaxDecodeRows && DecodeComesFirst(params);
    const int64_t most = int64_t{residency.sms} * (leave_room ? 1 : 2);
    config.gridDim = dim3(static_cast<unsigned>(std::clamp<int64_t>(rows, 1, most)));
    config.blockDim = dim3(kCombineThreads);
    config.dynamicSmemBytes = sizeof(CombineShared<S::kBlockKeys, S::kRows>);
  }
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = residency.dependent ? 1 : 0;
  cudaLaunchConfig_t split = config;
  split.gridDim = dim3(static_cast<unsigned>(args.heads), static_cast<unsigned>(args.teams));
  split.blockDim = dim3(S::kThreads);
  split.dynamicSmemBytes = sizeof(SplitShared<S>);
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&split, DecodeSplitKernel<S>, args));
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&config, args.few ? kCombineFewKernelOf<S> : kCombineKernelOf<S>, args));
  return Status::Ok();
}

template <Format kFormat, int kDim, int kRowTiles, bool kNarrow>
Status LaunchDepth(const PagedAttentionParams& params, const Layout& layout, Stream stream) {
  using Deep = Shape<kFormat, kDim, kRowTiles, kNarrow, true>;
  using Shallow = Shape<kFormat, kDim, kRowTiles, kNarrow, false>;
  static_assert(sizeof(SplitShared<Shallow>) <= 99 * 1024, "what a block may have on every GPU from sm_80 on");
  Residency residency;
  if (Status status = GetResidency<Deep>(&residency); !status.ok()) return status;
  return residency.deep ? LaunchShape<Deep>(params, layout, stream) : LaunchShape<Shallow>(params, layout, stream);
}

template <Format kFormat, int kDim>
Status LaunchDim(const PagedAttentionParams& params, const Layout& layout, Stream stream) {
  if constexpr (kFormat == Format::kE4M3 || kFormat == Format::kE5M2) {
    if (layout.narrow) return LaunchDepth<kFormat, kDim, 2, true>(params, layout, stream);
  }
  return layout.row_tiles == 1 ? LaunchDepth<kFormat, kDim, 1, false>(params, layout, stream)
                               : LaunchDepth<kFormat, kDim, 2, false>(params, layout, stream);
}

template <Format kFormat>
Status LaunchFormat(const PagedAttentionParams& params, Stream stream) {
  const Layout layout = MakeLayout(params);
  switch (layout.dim) {
    case 64:
      return LaunchDim<kFormat, 64>(params, layout, stream);
    case 128:
      return LaunchDim<kFormat, 128>(params, layout, stream);
    case 192:
      if constexpr (kFormat == Format::kF16 || kFormat == Format::kBF16) {
        return LaunchDim<kFormat, 192>(params, layout, stream);
      }
      [[fallthrough]];
    default:
      return LaunchDim<kFormat, 256>(params, layout, stream);
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LAUNCH_CUH_
