// How the kernel of sm_90a divides a product, and its launch.
#ifndef XLA_GPU_OPS_LINEAR_SM90_LAUNCH_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_kernel.cuh"

namespace xla_gpu::linear {

// Dynamic shared memory of a CTA. Two of the first size fit an SM, with the 1 KB that each has beside it. More than the
// second is no faster.
inline constexpr int kSm90HalfBytes = 113 * 1024;
inline constexpr int kSm90MostBytes = 144 * 1024;

struct Sm90Plan {
  int cluster;
  int weight_stages;
  int x_stages;
};

// The number of CTAs that divide k: as many as leave no SM of an H100 or H200 with two of them. Such a GPU has room for
// `kMostClusters` clusters at once. Depends on the work tiles, n, and the chunks, k, alone.
constexpr int ClusterSize(int tiles, int chunks) {
  constexpr int kMostClusters[9] = {0, 132, 66, 42, 30, 23, 19, 15, 14};
  int cluster = 8;
  while (cluster > 1 && (tiles > kMostClusters[cluster] || chunks < 2 * cluster)) --cluster;
  return cluster;
}

template <typename Config>
Sm90Plan MakePlan(int tiles, int chunks) {
  Sm90Plan plan;
  plan.cluster = ClusterSize(tiles, chunks);
  // Where each CTA can have an SM, and the weights' bytes are the limit, keeps them separate: CTAs that start while
  // others end would otherwise share an SM.
  const bool one_of_sm =
      tiles * plan.cluster <= 132 && (Config::kRowTile == 8 || Config::kFormat != WeightFormat::kPlain);
  const int bytes = (one_of_sm ? kSm90MostBytes : kSm90HalfBytes) - Config::kBarrierBytes;
  plan.x_stages = Config::kXStagesOfChunk - 1 + (Config::kRowTile == 64 ? 3 : Config::kRowTile == 32 ? 4 : 8);
  plan.weight_stages =
      std::min<int>(Config::kMaxStages, (bytes - plan.x_stages * Config::kXStageBytes) / Config::kWeightStageBytes);
  return plan;
}

// Whether the current device runs code for sm_90a: the kernel is empty, of one warp, in code for other targets.
template <typename Config>
Status SupportsSm90a(bool* supported) {
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, LinearSm90Kernel<Config>));
  *supported = code.maxThreadsPerBlock >= Config::kThreads;
  return Status::Ok();
}

template <typename Config>
Status LaunchPlan(const LinearArgs& linear, const Sm90Plan& plan, int tiles, int chunks, Stream stream,
                  LaunchOrder order) {
  Sm90Args args = {};
  args.linear = linear;
  args.cluster = plan.cluster;
  args.chunks = chunks;
  args.weight_stages = plan.weight_stages;
  args.x_stages = plan.x_stages;
  args.weights_first = order == LaunchOrder::kDependent;
  const auto row_bytes = static_cast<uint64_t>(linear.weight_row_bytes);
  if (!EncodeMatrix(linear.weight, static_cast<uint64_t>(linear.n), row_bytes, Config::kBoxRows, &args.weight_map) ||
      !EncodeMatrix(linear.x, static_cast<uint64_t>(linear.rows), static_cast<uint64_t>(linear.k) * 2, Config::kRowTile,
                    &args.x_map)) {
    return Status::Internal(
        "linear: no tensor map of weight or x: expected memory aligned to 16 bytes, and a driver that has tensor maps");
  }
  const auto kernel = LinearSm90Kernel<Config>;
  const int ring = plan.weight_stages * Config::kWeightStageBytes + plan.x_stages * Config::kXStageBytes;
  const int bytes = std::max(ring + Config::kBarrierBytes, Config::kSumBytes);
  // The same for all plans: another thread may launch this kernel in between.
  XLA_GPU_RETURN_IF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSm90MostBytes));
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(tiles * plan.cluster));
  launch.blockDim = dim3(Config::kThreads);
  launch.dynamicSmemBytes = static_cast<size_t>(bytes);
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = 2;
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&launch, kernel, args));
  return Status::Ok();
}

template <typename Config>
Status LaunchSm90(const LinearArgs& linear, Stream stream, LaunchOrder order) {
  const bool gated = linear.activation != Activation::kNone;
  const int out_features = gated ? linear.n / 2 : linear.n;
  const int tile_features = gated ? Config::kTileFeatures / 2 : Config::kTileFeatures;
  const int tiles = out_features / tile_features + (out_features % tile_features != 0);
  const int chunks = linear.k / Config::kStageK + (linear.k % Config::kStageK != 0);
  return LaunchPlan<Config>(linear, MakePlan<Config>(tiles, chunks), tiles, chunks, stream, order);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_LAUNCH_CUH_
