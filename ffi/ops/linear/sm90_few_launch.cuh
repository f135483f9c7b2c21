// How the kernel of sm_90a for few rows and plain weights divides a product, and its launch.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FEW_LAUNCH_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FEW_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_clusters.cuh"
#include "ffi/ops/linear/sm90_few_kernel.cuh"

namespace xla_gpu::linear {

// Boxes with fewer weight rows have two chunks: with one, of 4 and 6 KB, products took 4 to 28 % longer.
inline constexpr int kRowsOfWideBox = 56;
// Behind a product with an activation the next one may start so many chunks before the last load, while all CTAs run:
// each then finds an SM of its own.
inline constexpr int kEarlyChunks = 8;
inline constexpr int kFewMostBytes = 208 * 1024;

// Over a longer k fewer CTAs than these do not keep memory busy: there clusters were 3 to 5 % faster.
inline constexpr int kLongK = 8192;
inline constexpr int kFewestOfLongK = 120;

// Work tiles of the weight rows of args->linear, few enough for each SM to have one. Returns how many there are.
template <typename Config>
int DivideFew(Sm90FewArgs* args) {
  const LinearArgs& linear = args->linear;
  args->cluster = 1;
  args->chunks = DivideUp(linear.k, Config::kChunkK);
  args->parts = PartsOfK(linear.n, args->chunks);  // those of the kernel for more rows, and so the bits
  for (int i = 0; i <= args->parts; ++i) args->chunk_begin[i] = args->chunks * i / args->parts;
  const int blocks = DivideUp(DivideUp(linear.n, 16), kMostClusters[1]);  // of 16 rows
  const int halves = args->parts == 1 && blocks > Config::kMostWarps / 2 ? 2 : 1;
  args->units = args->parts * halves;
  const int warps_of_unit = std::min(DivideUp(blocks, halves), Config::kMostWarps / args->units);
  args->unit_rows = warps_of_unit * 16;
  args->warps = args->units * warps_of_unit;
  args->inverse_of_warps = 256 / warps_of_unit + 1;
  const bool gated = linear.activation != Activation::kNone;
  args->boxes = gated ? 2 : 1;
  args->box_rows = args->unit_rows / args->boxes;
  return DivideUp(gated ? linear.n / 2 : linear.n, halves * args->box_rows);
}

// Not where the work tiles are more than SMs, nor where clusters are faster.
template <typename Config>
bool SuitsFew(const Sm90FewArgs& args, int tiles) {
  if (tiles > kMostClusters[1] || (tiles < kFewestOfLongK && args.linear.k > kLongK)) return false;
  return Config::kRowTile == 8 || (args.parts > 1 && args.boxes == 1);
}

// A stage, how many of them there are, and when the next kernel may start. Returns the dynamic shared memory of a CTA.
template <typename Config>
int PlanFewStages(int tiles, LaunchOrder order, Sm90FewArgs* args) {
  constexpr bool kUpTo8 = Config::kRowTile == 8;
  const LinearArgs& linear = args->linear;
  const bool gated = args->boxes == 2;
  args->columns = args->box_rows < kRowsOfWideBox && linear.k % Config::kChunkK == 0 ? 2 : 1;
  args->column_bytes = args->box_rows * 128;
  args->half_bytes = gated ? args->columns * args->column_bytes : args->unit_rows / 2 * 128;
  args->x_rows = kUpTo8 || Config::kRowTile > 32 ? linear.rows : Config::kRowTile;
  args->rounds = DivideUp(DivideUp(args->chunks, args->parts), args->columns);
  args->launch_at = std::max(args->rounds - 1 - (gated ? kEarlyChunks / args->columns : 0), 0);
  // ---- Shared memory
  const int stage_bytes = (args->unit_rows + args->x_rows) * 128 * args->columns;
  const int sum_bytes = kUpTo8 ? args->parts * linear.rows * FewSumPitch(args->unit_rows) * 4 : 0;
  const int halves = args->units / args->parts, whole_tiles = args->parts == 1 ? tiles : 0;
  const int bytes = kUpTo8 ? BytesBesideNext(gated, order, whole_tiles, halves * args->unit_rows) : kFewMostBytes;
  // Warps read all rows of a row tile: behind the last stage's x what comes behind it.
  const int past_x = kUpTo8 ? 0 : (Config::kRowTile - args->x_rows) * 128;
  args->weight_stages =
      std::min({Config::kMaxStages, (bytes - std::max(past_x, Config::kBarrierBytes) - sum_bytes) / stage_bytes,
                args->rounds * args->units});
  args->slots = DivideUp(args->weight_stages, args->units);
  return bytes;
}

inline Status EncodeFewMaps(Sm90FewArgs* args) {
  const LinearArgs& linear = args->linear;
  const auto encode = [&](const void* start, int rows, int64_t row_bytes, int box_rows, CUtensorMap* map) {
    return args->columns == 1 ? EncodeMatrix(start, rows, row_bytes, box_rows, map)
                              : EncodeMatrixColumns(start, rows, row_bytes, box_rows, args->columns, map);
  };
  const bool encoded = encode(linear.weight, linear.n, linear.weight_row_bytes, args->box_rows, &args->weight_map) &&
                       encode(linear.x, linear.rows, int64_t{linear.k} * 2, args->x_rows, &args->x_map);
  return encoded ? Status::Ok() : NoTensorMap();
}

// `launched`: false where RunsSm90a or SuitsFew says so.
template <typename Config>
Status LaunchFewSm90(const LinearArgs& linear, Stream stream, LaunchOrder order, bool* launched) {
  constexpr bool kUpTo8 = Config::kRowTile == 8;
  const auto kernel = FewSm90Kernel<Config>;
  if (Status status = RunsSm90a(kernel, Config::kThreads, launched); !status.ok() || !*launched) return status;
  Sm90FewArgs args = {};
  args.linear = linear;
  const int tiles = DivideFew<Config>(&args);
  *launched = SuitsFew<Config>(args, tiles);
  if (!*launched) return Status::Ok();
  args.inverse_of_width = (1 << kInverseShift) / (kUpTo8 ? args.box_rows : args.box_rows / 4) + 1;
  args.weights_first = order == LaunchOrder::kDependent;
  const int bytes = PlanFewStages<Config>(tiles, order, &args);
  if (Status status = EncodeFewMaps(&args); !status.ok()) return status;
  const int most_bytes = kUpTo8 ? kMoreThanHalfOfSmBytes : kFewMostBytes;
  if (Status status = AllowSharedMemory(kernel, most_bytes); !status.ok()) return status;
  return LaunchClusters(kernel, args, tiles, (args.warps + 2) * 32, bytes, stream);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FEW_LAUNCH_CUH_
