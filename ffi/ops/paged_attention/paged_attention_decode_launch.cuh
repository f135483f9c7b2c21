// Launches of the decode kernel for one cache format. Each format has its own source file, for the compiler's time.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_LAUNCH_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_LAUNCH_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <string>

#include "ffi/ops/paged_attention/paged_attention_decode_args.h"
#include "ffi/ops/paged_attention/paged_attention_decode_formats.h"
#include "ffi/ops/paged_attention/paged_attention_decode_kernel.cuh"

namespace xla_gpu::decode {

// How a kernel is launched on a device.
struct Residency {
  bool known = false;
  bool sm90 = false;     // the kernel's code is for sm_90 or above
  bool cluster = false;  // clusters of kTeam blocks fit
  int teams = 0;         // that are resident at a time
  int stages = 0;
  int shared_bytes = 0;
};

inline cudaLaunchConfig_t TeamConfig(const Residency& residency, int teams, int threads, Stream stream,
                                     cudaLaunchAttribute (&attributes)[2]) {
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(kTeam), 1, 1};
  // A team's blocks each want an SM's bandwidth for themselves.
  attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  attributes[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(teams * kTeam));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(residency.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = residency.cluster ? 2 : 0;
  return config;
}

template <typename S>
Status FindResidency(int device, Residency* residency) {
  int per_sm, per_block, reserved, sms;
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  constexpr int kFixed = static_cast<int>(sizeof(Shared<S>));
  int blocks = S::kBlocksPerSm;
  int stages = (std::min(per_block, per_sm / blocks - reserved) - kFixed) / S::kStageBytes;
  if (stages < 2) {
    blocks = 1;
    stages = (per_block - kFixed) / S::kStageBytes;
  }
  if (stages < 1) return Status::Internal("paged_attention: the device has too little shared memory");
  residency->stages = std::min(stages, S::kMaxStages);
  residency->shared_bytes = residency->stages * S::kStageBytes + kFixed;
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(DecodeKernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, residency->shared_bytes));
  residency->teams = std::max(1, sms * blocks / kTeam);

  // Clusters need code compiled for them, not only a device that has them.
  cudaFuncAttributes attributes;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&attributes, DecodeKernel<S>));
  residency->sm90 = attributes.ptxVersion >= 90;
  if (residency->sm90) {
    residency->cluster = true;
    cudaLaunchAttribute launch[2];
    const cudaLaunchConfig_t config = TeamConfig(*residency, 1, S::kThreads, nullptr, launch);
    int clusters = 0;
    const bool can =
        cudaFuncSetAttribute(DecodeKernel<S>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&clusters, DecodeKernel<S>, &config) == cudaSuccess && clusters > 0;
    if (!can) cudaGetLastError();
    residency->cluster = can;
    if (can) residency->teams = clusters;
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

// The driver's function, or null. Looked up once; the driver is not linked with.
inline decltype(&cuTensorMapEncodeTiled) TensorMapEncoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function) : nullptr;
  }();
  return encoder;
}

// The keys of a box: as many as a tile and a page are multiples of. 0 where the copy engine cannot be used: pages too
// small for it to pay, or rows that do not start on 16 bytes.
template <typename S>
int MakeTensorMaps(const PagedAttentionParams& params, TensorMaps* maps) {
  const int64_t bytes = S::kElementBytes;
  int keys = S::kTile;
  while (params.page_size % keys != 0) keys /= 2;
  const auto encode = TensorMapEncoder();
  if (keys < 8 || params.head_dim * bytes % 16 != 0 || encode == nullptr) return 0;
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(params.head_dim), static_cast<cuuint64_t>(params.num_kv_heads),
                               static_cast<cuuint64_t>(params.page_size), static_cast<cuuint64_t>(params.num_pages)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(params.head_stride * bytes),
                                 static_cast<cuuint64_t>(params.slot_stride * bytes),
                                 static_cast<cuuint64_t>(params.page_stride * bytes)};
  const cuuint32_t box[4] = {S::kSliceRowBytes / S::kElementBytes, 1, static_cast<cuuint32_t>(keys), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const void* const bases[2] = {params.k_cache, params.v_cache};
  CUtensorMap* const to[2] = {&maps->k, &maps->v};
  for (int i = 0; i < 2; ++i) {
    const CUresult result =
        encode(to[i], S::kFloat8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 4,
               const_cast<void*>(bases[i]), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               S::kSliceRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
               CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) return 0;
  }
  return keys;
}

template <typename S>
Status LaunchShape(const PagedAttentionParams& params, Stream stream) {
  Residency residency;
  if (Status status = GetResidency<S>(&residency); !status.ok()) return status;

  DecodeArgs args = MakeArgs(params);
  args.stages = residency.stages;
  args.cluster = residency.cluster;
  TensorMaps maps = {};
  if (residency.sm90) args.box_keys = MakeTensorMaps<S>(params, &maps);
  const int64_t units = std::min(params.max_seqs, params.num_tokens) * params.num_kv_heads;
  args.num_teams = static_cast<int>(std::min<int64_t>(residency.teams, std::max<int64_t>(units, 1)));

  // Partial results go through the scratch where there are no clusters: as many sequences at a time as it holds.
  const int64_t rows = DecodeScratchRows(params);
  args.slot_by_sequence = !residency.cluster && rows < std::min(params.num_tokens, params.max_seqs * kMaxDecodeRows);
  const int64_t step = args.slot_by_sequence ? std::max<int64_t>(rows / kMaxDecodeRows, 1) : params.max_seqs;
  int64_t begin = 0;
  do {
    args.seq_begin = static_cast<int>(begin);
    args.seq_end = static_cast<int>(std::min(begin + step, params.max_seqs));
    cudaLaunchAttribute attributes[2];
    const cudaLaunchConfig_t config = TeamConfig(residency, args.num_teams, S::kThreads, stream, attributes);
    XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&config, DecodeKernel<S>, args, maps));
    if (!residency.cluster && args.seq_end > args.seq_begin) {
      const dim3 grid(args.seq_end - args.seq_begin, static_cast<unsigned>(params.num_kv_heads));
      MergeScratchKernel<S><<<grid, S::kThreads, 0, stream>>>(args);
      XLA_GPU_RETURN_IF_LAUNCH_FAILED();
    }
    args.fill_unowned = false;
    begin += step;
  } while (begin < params.max_seqs);
  return Status::Ok();
}

template <Format kFormat>
Status LaunchFormat(const PagedAttentionParams& params, Stream stream) {
  if (params.head_dim <= 64) return LaunchShape<Shape<kFormat, 64>>(params, stream);
  if (params.head_dim <= 128) return LaunchShape<Shape<kFormat, 128>>(params, stream);
  if (params.head_dim <= 192) return LaunchShape<Shape<kFormat, 192>>(params, stream);
  return LaunchShape<Shape<kFormat, 256>>(params, stream);
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_LAUNCH_CUH_
