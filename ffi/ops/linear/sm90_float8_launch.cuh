// How the kernel of sm_90a for float8 weights divides a product, and its launch.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FLOAT8_LAUNCH_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FLOAT8_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch.cuh"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_clusters.cuh"
#include "ffi/ops/linear/sm90_float8_kernel.cuh"
#include "ffi/ops/linear/sm90_launch.cuh"

namespace xla_gpu::linear {

// Splits x into scratch memory, unless that has been done, where the kernel behind finds it. See LinearScratchBytes.
template <int kRowTile>
Status LaunchSplitRows(const LinearArgs& linear, Stream stream, LaunchOrder order, Sm90Args* args) {
  constexpr int kWarps = 4, kItemsOfGroup = kSplitRows / 4;
  const int groups = (args->chunks + 1) / 2;
  auto* const terms = reinterpret_cast<char*>(linear.counters);
  args->linear.partials = reinterpret_cast<float*>(terms + SplitTermBytes(linear.k));
  const dim3 ctas(static_cast<unsigned>(groups * (kItemsOfGroup / kWarps)));
  if (!linear.x_is_split) {
    Status status =
        LaunchKernel(SplitRowsKernel<kWarps>, ctas, dim3(kWarps * 32), /*shared_bytes=*/0, stream, order,
                     static_cast<const uint16_t*>(linear.x), linear.rows, linear.k, terms, args->linear.partials);
    if (!status.ok()) return status;
  }
  if (!EncodeMatrix(terms, 2 * kSplitRows, static_cast<uint64_t>(linear.k), kRowTile, &args->x_map)) {
    return Status::Internal("linear: no tensor map of split rows: expected a driver that has tensor maps");
  }
  return Status::Ok();
}

// The cluster, and so the bits, depends on n, k and the format alone. `launched`: RunsSm90a.
template <typename Config>
Status LaunchFloat8Sm90(const LinearArgs& linear, Stream stream, LaunchOrder order, bool* launched) {
  const auto kernel = Float8Sm90Kernel<Config>;
  if (Status status = RunsSm90a(kernel, Config::kThreads, launched); !status.ok() || !*launched) return status;
  Sm90Args args = {};
  args.linear = linear;
  args.chunks = DivideUp(linear.k, Config::kStageK);
  Sm90Plan plan = {};
  const bool gated = linear.activation != Activation::kNone;
  Divide<Config>(linear.n, args.chunks, gated, &plan);
  args.cluster = plan.cluster;
  plan.box_rows = plan.boxes * plan.box_rows / 2;
  args.boxes = 2;
  args.box_rows = plan.box_rows;
  const int groups = (args.chunks + 1) / 2, columns = gated ? plan.box_rows : 2 * plan.box_rows;
  DivideColumns(columns, &args);
  int widest = 0;
  for (int i = 0; i <= args.cluster; ++i) {
    args.chunk_begin[i] = std::min(groups * i / args.cluster * 2, args.chunks);
    if (i > 0) widest = std::max(widest, args.column_begin[i] - args.column_begin[i - 1]);
  }
  args.short_epilogue = linear.rows * widest <= Config::kConsumers;
  args.weight_stages = Config::kWeightBytes / (2 * plan.box_rows * 128);
  args.x_stages = Config::kXStages;
  args.weights_first = order == LaunchOrder::kDependent;
  if (Status status = EncodeMaps(plan.box_rows, Config::kRowTile, &args); !status.ok()) return status;
  if constexpr (Config::kSplitBefore) {
    if (Status status = LaunchSplitRows<Config::kRowTile>(linear, stream, order, &args); !status.ok()) return status;
  }
  const int ring = args.weight_stages * 2 * plan.box_rows * 128 + Config::kXStages * Config::kXStageBytes;
  int bytes = std::max<int>(ring + Config::kBarrierBytes + Config::kFactorBytes, Config::kSumBytes);
  if constexpr (Config::kCtasOfSm == 2) {
    constexpr int kMostBytes =
        Config::kWeightBytes + Config::kXStages * Config::kXStageBytes + Config::kBarrierBytes + Config::kFactorBytes;
    static_assert(std::max(kMostBytes, Config::kSumBytes) <= kHalfOfSmBytes);
    const int whole_tiles = args.cluster == 1 ? plan.tiles : 0;
    if (BytesBesideNext(gated, order, whole_tiles, 2 * plan.box_rows) > kHalfOfSmBytes)
      bytes = std::max(bytes, kMoreThanHalfOfSmBytes);
    XLA_GPU_RETURN_IF_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  }
  XLA_GPU_RETURN_IF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
  return LaunchClusters(kernel, args, plan.tiles, Config::kThreads, bytes, stream);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FLOAT8_LAUNCH_CUH_
