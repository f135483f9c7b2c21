// The launches of the decode kernels for one cache format. Each format has its own source file, so that they compile in
// parallel.
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

// How the kernels of a traits class run on a device.
struct Occupancy {
  bool known = false;
  int sms = 0;
  int ctas = 0;  // of the split-KV kernel that are resident at a time
  // The device's code has large shared memory (traits.cuh). Of the other traits class nothing else is known.
  bool large_shared_memory = false;
  bool dependent = false;  // the kernels' code is for sm_90 or newer: programmatic dependent launch
};

template <typename Traits>
inline constexpr auto kCombineKernel = DecodeCombineKernel<Traits::kHeadDim, Traits::kBlockKeys, Traits::kRows>;
template <typename Traits>
inline constexpr auto kCombineSmallKernel =
    DecodeCombineSmallKernel<Traits::kHeadDim, Traits::kBlockKeys, Traits::kRows>;

template <typename Traits>
Status QueryOccupancy(int device, Occupancy* occupancy) {
  constexpr int kSplitKvBytes = static_cast<int>(sizeof(SplitKvSharedStorage<Traits>));
  constexpr int kCombineBytes = static_cast<int>(sizeof(CombineSharedStorage<Traits::kBlockKeys, Traits::kRows>));
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, kCombineKernel<Traits>));
  occupancy->dependent = code.ptxVersion >= 90;
  occupancy->large_shared_memory = HasLargeSharedMemory(code.ptxVersion * 10);
  if (occupancy->large_shared_memory != Traits::kLargeSharedMemory) {
    occupancy->known = true;
    return Status::Ok();
  }
  int sms, bytes_per_cta, ctas;
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&bytes_per_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (std::max(kSplitKvBytes, kCombineBytes) > bytes_per_cta) {
    return Status::Internal("paged_attention: this head_dim needs " +
                            std::to_string(std::max(kSplitKvBytes, kCombineBytes)) +
                            " bytes of shared memory in a block, and the GPU has " + std::to_string(bytes_per_cta));
  }
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(DecodeSplitKvKernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSplitKvBytes));
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kCombineKernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kCombineBytes));
  XLA_GPU_RETURN_IF_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, DecodeSplitKvKernel<Traits>,
                                                                       Traits::kThreads, kSplitKvBytes));
  occupancy->sms = sms;
  occupancy->ctas = std::min(sms, kMaxSms) * std::clamp(ctas, 1, kCtasPerSm);
  // All kernels ask for the same carveout: an SM cannot change it while CTAs of another kernel are resident.
  for (const auto kernel : {DecodeSplitKvKernel<Traits>, kCombineKernel<Traits>, kCombineSmallKernel<Traits>}) {
    XLA_GPU_RETURN_IF_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  }
  occupancy->known = true;
  return Status::Ok();
}

// The occupancy on the current device, looked up once.
template <typename Traits>
Status GetOccupancy(Occupancy* occupancy) {
  constexpr int kMaxDevices = 64;
  static std::mutex mutex;
  static std::array<Occupancy, kMaxDevices> known;
  int device;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  if (device >= kMaxDevices) return QueryOccupancy<Traits>(device, occupancy);
  const std::lock_guard<std::mutex> lock(mutex);
  if (!known[device].known) {
    if (Status status = QueryOccupancy<Traits>(device, &known[device]); !status.ok()) return status;
  }
  *occupancy = known[device];
  return Status::Ok();
}

template <typename Traits>
Status LaunchKernels(const PagedAttentionParams& params, const KernelConfig& config, const Occupancy& occupancy,
                     Stream stream) {
  DecodeArgs args = MakeArgs(params, config);
  args.kv_l2_policy = kEvictFirst;
  args.slot_stride_bytes = static_cast<uint32_t>(params.slot_stride * Traits::kElementBytes);
  PartitionWork(config, Traits::kBlockKeys, occupancy.ctas, &args);
  // Not behind the prefill path, which has waited for everything before it.
  args.wait_at_start = params.num_tokens <= kMaxDecodeRows || DecodeComesFirst(params);

  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t split_kv = {};
  split_kv.gridDim = dim3(static_cast<unsigned>(args.cta_group_size), static_cast<unsigned>(args.num_cta_groups));
  split_kv.blockDim = dim3(Traits::kThreads);
  split_kv.dynamicSmemBytes = sizeof(SplitKvSharedStorage<Traits>);
  split_kv.stream = stream;
  split_kv.attrs = &attribute;
  split_kv.numAttrs = occupancy.dependent ? 1 : 0;
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&split_kv, DecodeSplitKvKernel<Traits>, args));

  cudaLaunchConfig_t combine = split_kv;
  if (args.store_every_split) {
    combine.gridDim = dim3(static_cast<unsigned>(config.work_tiles * config.accum_rows));
    combine.blockDim = dim3(kCombineSmallThreads);
    combine.dynamicSmemBytes = 0;
    XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&combine, kCombineSmallKernel<Traits>, args));
    return Status::Ok();
  }
  // A warp for each row of a split tile. There is at most one split tile for each boundary between intervals.
  const int64_t rows =
      std::min<int64_t>(args.num_cta_groups - 1, config.work_tiles) * args.cta_group_size * config.accum_rows;
  // Where the prefill path follows, one CTA on each SM leaves registers for a small prefill CTA.
  const bool leave_room = params.num_tokens > kMaxDecodeRows && DecodeComesFirst(params);
  const int64_t most = int64_t{occupancy.sms} * (leave_room ? 1 : 2);
  combine.gridDim = dim3(static_cast<unsigned>(std::clamp<int64_t>(rows, 1, most)));
  combine.blockDim = dim3(kCombineThreads);
  combine.dynamicSmemBytes = sizeof(CombineSharedStorage<Traits::kBlockKeys, Traits::kRows>);
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&combine, kCombineKernel<Traits>, args));
  return Status::Ok();
}

template <CacheFormat kFormat, int kHeadDim, int kRowTiles, bool kNarrowCopies>
Status LaunchForDevice(const PagedAttentionParams& params, const KernelConfig& config, Stream stream) {
  using Large = KernelTraits<kFormat, kHeadDim, kRowTiles, kNarrowCopies, true>;
  using Small = KernelTraits<kFormat, kHeadDim, kRowTiles, kNarrowCopies, false>;
  static_assert(sizeof(SplitKvSharedStorage<Small>) <= 99 * 1024, "what a CTA may have on every GPU from sm_80 on");
  Occupancy occupancy;
  if (Status status = GetOccupancy<Large>(&occupancy); !status.ok()) return status;
  if (occupancy.large_shared_memory) return LaunchKernels<Large>(params, config, occupancy, stream);
  if (Status status = GetOccupancy<Small>(&occupancy); !status.ok()) return status;
  return LaunchKernels<Small>(params, config, occupancy, stream);
}

template <CacheFormat kFormat, int kHeadDim>
Status LaunchHeadDim(const PagedAttentionParams& params, const KernelConfig& config, Stream stream) {
  if constexpr (kFormat == CacheFormat::kE4M3 || kFormat == CacheFormat::kE5M2) {
    if (config.narrow_copies) return LaunchForDevice<kFormat, kHeadDim, 2, true>(params, config, stream);
  }
  return config.row_tiles == 1 ? LaunchForDevice<kFormat, kHeadDim, 1, false>(params, config, stream)
                               : LaunchForDevice<kFormat, kHeadDim, 2, false>(params, config, stream);
}

template <CacheFormat kFormat>
Status LaunchFormat(const PagedAttentionParams& params, Stream stream) {
  const KernelConfig config = MakeKernelConfig(params);
  switch (config.head_dim) {
    case 64:
      return LaunchHeadDim<kFormat, 64>(params, config, stream);
    case 128:
      return LaunchHeadDim<kFormat, 128>(params, config, stream);
    case 192:
      if constexpr (kFormat == CacheFormat::kF16 || kFormat == CacheFormat::kBF16) {
        return LaunchHeadDim<kFormat, 192>(params, config, stream);
      }
      [[fallthrough]];
    default:
      return LaunchHeadDim<kFormat, 256>(params, config, stream);
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_LAUNCH_CUH_
