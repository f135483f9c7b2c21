// How the kernel of sm_90a for plain weights divides a product, and its launch.
#ifndef XLA_GPU_OPS_LINEAR_SM90_LAUNCH_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_clusters.cuh"
#include "ffi/ops/linear/sm90_kernel.cuh"

namespace xla_gpu::linear {

// Dynamic shared memory of a CTA. Two of the first size fit an SM, with the 1 KB that each has beside it. More than the
// second is no faster.
inline constexpr int kSm90HalfBytes = 113 * 1024;
inline constexpr int kSm90MostBytes = 144 * 1024;

struct Sm90Plan {
  int cluster;  // as in Sm90Args, as the next two
  int boxes;
  int box_rows;
  int tiles;  // work tiles
  int weight_stages;
  int x_stages;
};

// Divides n weight rows and the chunks of k. Where one CTA has all of k, work tiles are as small as lets each have an
// SM, or where they are more, as gives every SM as many. The cluster, and so the bits, depends on n and k alone.
template <typename Config>
void Divide(int n, int chunks, bool gated, Sm90Plan* plan) {
  static_assert(Config::kTileFeatures == kFeaturesOfParts);
  int features = Config::kTileFeatures;
  plan->cluster = PartsOfK(n, chunks);
  if (plan->cluster == 1) {
    // Up to 8 rows work tiles beyond the SMs are no faster in equal rounds.
    const int rounds = Config::kRowTile == 8 ? 1 : (DivideUp(n, features) - 1) / kMostClusters[1] + 1;
    while (features > Config::kBoxRows && DivideUp(n, features - 16) <= rounds * kMostClusters[1]) features -= 16;
  }
  plan->boxes = gated || features > Config::kBoxRows ? 2 : 1;
  plan->box_rows = features / plan->boxes;
  plan->tiles = gated ? DivideUp(n / 2, plan->box_rows) : DivideUp(n, features);
}

template <typename Config>
Sm90Plan MakePlan(int n, int chunks, bool gated) {
  Sm90Plan plan = {};
  Divide<Config>(n, chunks, gated, &plan);
  // Where each CTA can have an SM, keeps them separate: CTAs that start while others end would otherwise share one.
  const bool one_of_sm = plan.tiles * plan.cluster <= kMostClusters[1];
  const int bytes = (one_of_sm ? kSm90MostBytes : kSm90HalfBytes) - Config::kBarrierBytes;
  plan.x_stages = Config::kXStagesOfChunk - 1 + (Config::kRowTile == 64 ? 3 : Config::kRowTile == 32 ? 4 : 8);
  plan.weight_stages = std::min<int>(Config::kMaxStages, (bytes - plan.x_stages * Config::kXStageBytes) /
                                                             (Config::kBoxesOfStage * plan.box_rows * 128));
  return plan;
}

template <typename Config>
Status LaunchPlan(const LinearArgs& linear, const Sm90Plan& plan, int chunks, Stream stream, LaunchOrder order) {
  Sm90Args args = {};
  args.linear = linear;
  args.cluster = plan.cluster;
  args.boxes = plan.boxes;
  args.box_rows = plan.box_rows;
  args.chunks = chunks;
  for (int i = 0; i <= args.cluster; ++i) args.chunk_begin[i] = chunks * i / args.cluster;
  DivideColumns(plan.box_rows * (linear.activation == Activation::kNone ? plan.boxes : 1), &args);
  args.weight_stages = plan.weight_stages;
  args.x_stages = plan.x_stages;
  args.weights_first = order == LaunchOrder::kDependent;
  if (Status status = EncodeMaps(plan.box_rows, Config::kRowTile, &args); !status.ok()) return status;
  const auto kernel = LinearSm90Kernel<Config>;
  const int stage_bytes = Config::kBoxesOfStage * plan.box_rows * 128;
  const int ring = plan.weight_stages * stage_bytes + plan.x_stages * Config::kXStageBytes;
  // wgmma reads the last stage as if it had all its rows.
  const int read = (plan.weight_stages - 1) * stage_bytes + Config::kStageRows * 128;
  const int bytes = std::max({ring + Config::kBarrierBytes, read, Config::kSumBytes});
  if (Status status = AllowSharedMemory(kernel, kSm90MostBytes); !status.ok()) return status;
  return LaunchClusters(kernel, args, plan.tiles, Config::kThreads, bytes, stream);
}

template <typename Config>
Status LaunchSm90(const LinearArgs& linear, Stream stream, LaunchOrder order) {
  const int chunks = DivideUp(linear.k, Config::kStageK);
  const auto plan = MakePlan<Config>(linear.n, chunks, linear.activation != Activation::kNone);
  return LaunchPlan<Config>(linear, plan, chunks, stream, order);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_LAUNCH_CUH_
