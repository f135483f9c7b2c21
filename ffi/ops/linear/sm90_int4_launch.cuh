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
  const int parts = Int4Parts(linear), needed = DivideUp(DivideUp(linear.n, 16), kMostClusters[1]);
  return needed > Int4Traits<__half, 8, 1>::kMostWarps / parts &&
         needed <= 2 * (Int4Traits<__half, 8, 2>::kMostWarps / parts);
}

// A work tile of args->linear where so many CTAs divide k: few enough features for each cluster to have its SMs. False
// where those are too many for one, or for two stages of each part in shared memory.
template <typename Config>
bool DivideInt4(int parts, int cluster, Sm90Int4Args* args) {
  const bool gated = args->linear.activation != Activation::kNone;
  const int out_features = gated ? args->linear.n / 2 : args->linear.n;
  args->boxes = gated ? 2 : 1;
  args->cluster = cluster;
  args->parts = parts / cluster;
  const int box_tiles = DivideUp(DivideUp(out_features, 16), kMostClusters[cluster]);
  args->warps_of_part =
      std::min(Config::kMostWarps / args->parts, DivideUp(box_tiles * args->boxes, Config::kTilesOfWarp));
  // Of a gated product a box has whole tiles.
  if (Config::kTilesOfWarp == 1) args->warps_of_part -= args->warps_of_part % args->boxes;
  args->box_rows = args->warps_of_part * Config::kTilesOfWarp * 16 / args->boxes;
  const int stage_bytes = args->boxes * args->box_rows * 128 + Int4XBytes(Config::kRowTile);
  return DivideUp(out_features, args->box_rows) <= kMostClusters[cluster] &&
         2 * args->parts * stage_bytes <= Config::kRingBytes;
}

// The parts of k, who has them, and a work tile. False where work tiles of sm90_converted_kernel.cuh, which have more
// features, are to be taken.
template <typename Config>
bool PlanInt4(Sm90Int4Args* args) {
  args->chunks = DivideUp(args->linear.k, Config::kChunkK);
  const int parts = Int4Parts(args->linear);
  for (int part = 0; part <= parts; ++part) args->part_begin[part] = args->chunks * part / parts;
  if constexpr (Config::kRowTile == 8) {
    DivideInt4<Config>(parts, 1, args);
    return true;
  } else {
    // As few CTAs as have room at once for the whole product, but at least two if there are parts.
    for (int cluster = std::min(parts, 2); cluster <= parts; ++cluster) {
      if (parts % cluster == 0 && DivideInt4<Config>(parts, cluster, args)) return true;
    }
    return false;
  }
}

// The ring's stages, and when the next kernel may start. Returns the dynamic shared memory of a CTA. `longest`: chunks
// of a part.
template <typename Config>
int PlanInt4Stages(int longest, Sm90Int4Args* args) {
  const bool gated = args->linear.activation != Activation::kNone;
  const int features = args->boxes * args->box_rows;
  const int stage_bytes = features * 128 + Int4XBytes(args->x_rows);
  const int sum_rows = Config::kRowTile == 8 ? args->linear.rows : Config::kRowTile;
  const int sum_bytes = args->parts * sum_rows * Int4SumPitch(features) * 4;
  int most = Config::kRingBytes, least = Config::kLeastBytes;
  if (Config::kRowTile == 8) {
    // A CTA of a gated product and one of the next product fit an SM, but not two of the latter: a grid that starts
    // while the one in front ends would otherwise have some SMs with two of its CTAs, and wait for those.
    most = (gated ? kHalfOfSmBytes : kMoreThanHalfOfSmBytes) - Config::kBarrierBytes - sum_bytes;
    if (!gated) least = kMoreThanHalfOfSmBytes;
  }
  args->stages = std::min({Config::kMaxStages, most / (args->parts * stage_bytes), longest});
  // Behind a gated product the next one starts, and loads its first weights, while all CTAs of this one still run.
  // Behind others the next kernel starts when the last loads have.
  args->launch_at = gated ? std::max(longest - 2 * args->stages, 0) : longest - 1;
  const int bytes = args->parts * args->stages * stage_bytes + Config::kBarrierBytes;
  return std::max(Config::kSumsBesideRing ? bytes + sum_bytes : std::max(bytes, sum_bytes), least);
}

template <typename Config>
Status EncodeInt4Maps(Sm90Int4Args* args) {
  const LinearArgs& linear = args->linear;
  const auto encode_x = Config::kRowTile == 8 ? EncodeMatrixRows : EncodeMatrixColumns;
  const bool encoded =
      EncodeMatrix(linear.weight, static_cast<uint64_t>(linear.n), static_cast<uint64_t>(linear.weight_row_bytes),
                   static_cast<uint32_t>(args->box_rows), &args->weight_map) &&
      encode_x(linear.x, static_cast<uint64_t>(linear.rows), static_cast<uint64_t>(linear.k) * 2,
               static_cast<uint32_t>(args->x_rows), Config::kChunkK / 64, &args->x_map);
  return encoded ? Status::Ok() : NoTensorMap();
}

// `launched`: false where RunsSm90a or PlanInt4 says so.
template <typename Config>
Status LaunchInt4Sm90(const LinearArgs& linear, Stream stream, LaunchOrder order, bool* launched) {
  const auto kernel = Int4Sm90Kernel<Config>;
  if (Status status = RunsSm90a(kernel, Config::kThreads, launched); !status.ok() || !*launched) return status;
  Sm90Int4Args args = {};
  args.linear = linear;
  *launched = PlanInt4<Config>(&args);
  if (!*launched) return Status::Ok();
  const bool gated = linear.activation != Activation::kNone;
  const int features = args.boxes * args.box_rows, columns = gated ? args.box_rows : features;
  args.inverse_of_warps = 256 / args.warps_of_part + 1;
  args.inverse_of_features = (1 << kInverseShift) / columns + 1;
  DivideColumns(columns, &args);
  args.weights_first = order == LaunchOrder::kDependent;
  args.x_rows = Config::kRowTile == 8 ? std::min(linear.rows, Config::kRowTile) : Config::kRowTile;
  const int bytes = PlanInt4Stages<Config>(DivideUp(args.chunks, args.parts * args.cluster), &args);
  if (Status status = EncodeInt4Maps<Config>(&args); !status.ok()) return status;
  if (Status status = AllowSharedMemory(kernel, 226 * 1024); !status.ok()) return status;
  const int needed_warps = args.parts * args.warps_of_part + std::min(args.parts, Config::kLoadingWarps);
  const int threads = Config::kFixedWarps ? Config::kThreads : needed_warps * 32;
  const int tiles = DivideUp(gated ? linear.n / 2 : linear.n, args.box_rows);
  return LaunchClusters(kernel, args, tiles, threads, bytes, stream);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_LAUNCH_CUH_
