// How the kernel of sm_90a for converted weights divides a product, and its launch.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_LAUNCH_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_converted_kernel.cuh"

namespace xla_gpu::linear {

// The number of CTAs that divide k: as many as leave no SM of an H100 or H200 with two of them. Such a GPU has room for
// `kMostClusters` clusters of a size at once. It, and so the bits, depends on n, k and the format alone.
constexpr int ConvertedClusterSize(int tiles, int chunks) {
  constexpr int kMostClusters[9] = {0, 132, 66, 42, 30, 23, 19, 15, 14};
  int cluster = 8;
  while (cluster > 1 && (tiles > kMostClusters[cluster] || chunks < 2 * cluster)) --cluster;
  return cluster;
}

// `launched`: whether the current device runs code for sm_90a. In code for other targets the kernel is empty, of one
// warp.
template <typename Config>
Status LaunchConvertedSm90(const LinearArgs& linear, Stream stream, LaunchOrder order, bool* launched) {
  const auto kernel = ConvertedSm90Kernel<Config>;
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, kernel));
  *launched = code.maxThreadsPerBlock >= Config::kThreads;
  if (!*launched) return Status::Ok();
  const bool gated = linear.activation != Activation::kNone;
  const int out_features = gated ? linear.n / 2 : linear.n;
  const int tile_features = gated ? Config::kTileFeatures / 2 : Config::kTileFeatures;
  const int tiles = out_features / tile_features + (out_features % tile_features != 0);
  Sm90Args args = {};
  args.linear = linear;
  args.chunks = linear.k / Config::kStageK + (linear.k % Config::kStageK != 0);
  args.cluster = ConvertedClusterSize(tiles, args.chunks);
  args.weight_stages = Config::kWeightStages;
  args.x_stages = Config::kXStages;
  args.weights_first = order == LaunchOrder::kDependent;
  if (!EncodeMatrix(linear.weight, static_cast<uint64_t>(linear.n), static_cast<uint64_t>(linear.weight_row_bytes),
                    Config::kBoxRows, &args.weight_map) ||
      !EncodeMatrix(linear.x, static_cast<uint64_t>(linear.rows), static_cast<uint64_t>(linear.k) * 2, Config::kRowTile,
                    &args.x_map)) {
    return Status::Internal(
        "linear: no tensor map of weight or x: expected memory aligned to 16 bytes, and a driver that has tensor maps");
  }
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(args.cluster), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(tiles * args.cluster));
  launch.blockDim = dim3(Config::kThreads);
  launch.dynamicSmemBytes = Config::kSharedBytes;
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = 2;
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&launch, kernel, args));
  return Status::Ok();
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_LAUNCH_CUH_
