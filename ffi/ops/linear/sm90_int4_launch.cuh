// How the kernel of sm_90a for int4 weights divides a product, and its launch.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_LAUNCH_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_clusters.cuh"
#include "ffi/ops/linear/sm90_int4_kernel.cuh"

namespace xla_gpu::linear {

// Up to 8 rows: whether warps have 32 features, not 16. Twice as many warps, with 64 registers each, hide more of each
// other's latencies; but a gated product, of which a CTA has up to 224 features, is faster with few. And a CTA has few
// where so many of 16 features would not let one on each SM have all of the product.
inline bool HasWideWarps(const LinearArgs& linear) {
  if (linear.activation != Activation::kNone) return true;
  const int tiles = linear.n / 16 + (linear.n % 16 != 0), parts = Int4Parts(linear);
  const int needed = tiles / kMostClusters[1] + (tiles % kMostClusters[1] != 0);
  return needed > Int4Traits<__half, 8, 1>::kMostWarps / parts &&
         needed <= 2 * (Int4Traits<__half, 8, 2>::kMostWarps / parts);
}

template <typename Config>
Status LaunchInt4Sm90(const LinearArgs& linear, Stream stream, LaunchOrder order, bool* launched) {
  const auto kernel = Int4Sm90Kernel<Config>;
  if (Status status = RunsSm90a(kernel, Config::kThreads, launched); !status.ok() || !*launched) return status;
  const auto divide = [](int value, int by) { return value / by + (value % by != 0); };
  const bool gated = linear.activation != Activation::kNone;
  const int out_features = gated ? linear.n / 2 : linear.n;
  Sm90Int4Args args = {};
  args.linear = linear;
  args.chunks = divide(linear.k, Config::kChunkK);
  const int parts = Int4Parts(linear);
  for (int part = 0; part <= parts; ++part) args.part_begin[part] = args.chunks * part / parts;
  // ---- A work tile: few enough features for each SM to have one
  args.boxes = gated ? 2 : 1;
  const auto divide_k = [&](int cluster) {
    args.cluster = cluster;
    args.parts = parts / cluster;
    const int box_tiles = divide(divide(out_features, 16), kMostClusters[cluster]);
    args.warps_of_part =
        std::min(Config::kMostWarps / args.parts, divide(box_tiles * args.boxes, Config::kTilesOfWarp));
    // Of a gated product a box has whole tiles.
    if (Config::kTilesOfWarp == 1) args.warps_of_part -= args.warps_of_part % args.boxes;
    args.box_rows = args.warps_of_part * Config::kTilesOfWarp * 16 / args.boxes;
    const int stage_bytes = args.boxes * args.box_rows * 128 + Int4XBytes(Config::kRowTile);
    return divide(out_features, args.box_rows) <= kMostClusters[cluster] &&
           2 * args.parts * stage_bytes <= Config::kRingBytes;
  };
  // From 9 rows on as few CTAs as have room at once for the whole product, and for two stages of each part, but at
  // least two if there are parts.
  int cluster = Config::kRowTile == 8 ? 1 : std::min(parts, 2);
  bool fits = divide_k(cluster) && parts % cluster == 0;
  if constexpr (Config::kRowTile > 8) {
    while (!fits && cluster < parts) {
      ++cluster;
      fits = parts % cluster == 0 && divide_k(cluster);
    }
    if (!fits) {  // work tiles of sm90_converted_kernel.cuh have more features
      *launched = false;
      return Status::Ok();
    }
  }
  args.inverse_of_warps = 256 / args.warps_of_part + 1;
  const int features = args.boxes * args.box_rows, tiles = divide(out_features, args.box_rows);
  args.inverse_of_features = (1 << kInverseShift) / (gated ? args.box_rows : features) + 1;
  DivideColumns(gated ? args.box_rows : features, &args);
  args.weights_first = order == LaunchOrder::kDependent;
  args.x_rows = Config::kRowTile == 8 ? std::min(linear.rows, Config::kRowTile) : Config::kRowTile;
  const int stage_bytes = features * 128 + Int4XBytes(args.x_rows);
  const int sum_rows = Config::kRowTile == 8 ? linear.rows : Config::kRowTile;
  const int sum_bytes = args.parts * sum_rows * Int4SumPitch(features) * 4;
  const int longest = divide(args.chunks, parts);
  int most = Config::kRingBytes, least = Config::kLeastBytes;
  if (Config::kRowTile == 8) {
    // A CTA of a gated product and one of the next product fit an SM, but not two of the latter: a grid that starts
    // while the one in front ends would otherwise have some SMs with two of its CTAs, and wait for those.
    most = (gated ? kHalfOfSmBytes : kMoreThanHalfOfSmBytes) - Config::kBarrierBytes - sum_bytes;
    if (!gated) least = kMoreThanHalfOfSmBytes;
  }
  args.stages = std::min({Config::kMaxStages, most / (args.parts * stage_bytes), longest});
  // Behind a gated product the next one starts, and loads its first weights, while all CTAs of this one still run.
  // Behind others the next kernel starts when the last loads have.
  args.launch_at = gated ? std::max(longest - 2 * args.stages, 0) : longest - 1;
  const int ring_bytes = args.parts * args.stages * stage_bytes;
  int bytes = ring_bytes + Config::kBarrierBytes;
  bytes = Config::kSumsBesideRing ? bytes + sum_bytes : std::max(bytes, sum_bytes);
  bytes = std::max(bytes, least);
  const auto encode_x = Config::kRowTile == 8 ? EncodeMatrixRows : EncodeMatrixColumns;
  if (!EncodeMatrix(linear.weight, static_cast<uint64_t>(linear.n), static_cast<uint64_t>(linear.weight_row_bytes),
                    static_cast<uint32_t>(args.box_rows), &args.weight_map) ||
      !encode_x(linear.x, static_cast<uint64_t>(linear.rows), static_cast<uint64_t>(linear.k) * 2,
                static_cast<uint32_t>(args.x_rows), Config::kChunkK / 64, &args.x_map)) {
    return Status::Internal(
        "linear: no tensor map of weight or x: expected memory aligned to 16 bytes, and a driver that has tensor maps");
  }
  // The same for all sizes: another thread may launch this kernel in between.
  XLA_GPU_RETURN_IF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 226 * 1024));
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  const int needed_warps = args.parts * args.warps_of_part + std::min(args.parts, Config::kLoadingWarps);
  const int threads = Config::kFixedWarps ? Config::kThreads : needed_warps * 32;
  return LaunchClusters(kernel, args, tiles, threads, bytes, stream);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_LAUNCH_CUH_
