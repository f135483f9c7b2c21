// How the kernel of sm_90a for converted weights divides a product, and its launch.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CONVERTED_LAUNCH_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CONVERTED_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_clusters.cuh"
#include "ffi/ops/linear/sm90_converted_kernel.cuh"

namespace xla_gpu::linear {

// The cluster, and so the bits, depends on n, k and the format alone. `launched`: RunsSm90a.
template <typename Config>
Status LaunchConvertedSm90(const LinearArgs& linear, Stream stream, LaunchOrder order, bool* launched) {
  const auto kernel = ConvertedSm90Kernel<Config>;
  if (Status status = RunsSm90a(kernel, Config::kThreads, launched); !status.ok() || !*launched) return status;
  const bool gated = linear.activation != Activation::kNone;
  const int out_features = gated ? linear.n / 2 : linear.n;
  const int tile_features = gated ? Config::kTileFeatures / 2 : Config::kTileFeatures;
  const int tiles = DivideUp(out_features, tile_features);
  Sm90Args args = {};
  args.linear = linear;
  args.chunks = DivideUp(linear.k, Config::kStageK);
  args.cluster = Config::kInt4 ? Int4Parts(linear) : ClusterSize(tiles, args.chunks);
  DivideColumns(tile_features, &args);
  args.weight_stages = Config::kWeightStages;
  args.x_stages = Config::kXStages;
  args.weights_first = order == LaunchOrder::kDependent;
  if (Status status = EncodeMaps(Config::kBoxRows, Config::kRowTile, &args); !status.ok()) return status;
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Config::kSharedBytes));
  return LaunchClusters(kernel, args, tiles, Config::kThreads, Config::kSharedBytes, stream);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CONVERTED_LAUNCH_CUH_
