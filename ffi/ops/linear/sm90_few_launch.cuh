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

// `launched`: false where RunsSm90a says so, where the work tiles are more than SMs, and where clusters are faster.
template <typename Config>
Status LaunchFewSm90(const LinearArgs& linear, Stream stream, LaunchOrder order, bool* launched) {
  constexpr bool kUpTo8 = Config::kRowTile == 8;
  const auto kernel = FewSm90Kernel<Config>;
  if (Status status = RunsSm90a(kernel, Config::kThreads, launched); !status.ok() || !*launched) return status;
  const auto divide = [](int value, int by) { return value / by + (value % by != 0); };
  const bool gated = linear.activation != Activation::kNone;
  Sm90FewArgs args = {};
  args.linear = linear;
  args.cluster = 1;
  args.chunks = divide(linear.k, Config::kChunkK);
  const int parts = PartsOfK(linear.n, args.chunks);  // those of the kernel for more rows, and so the bits
  args.parts = parts;
  for (int i = 0; i <= parts; ++i) args.chunk_begin[i] = args.chunks * i / parts;
  // ---- A work tile: few enough weight rows for each SM to have one
  const int blocks = divide(divide(linear.n, 16), kMostClusters[1]);  // of 16 rows
  const int halves = parts == 1 && blocks > Config::kMostWarps / 2 ? 2 : 1;
  args.units = parts * halves;
  const int warps_of_unit = std::min(divide(blocks, halves), Config::kMostWarps / args.units);
  args.unit_rows = warps_of_unit * 16;
  args.warps = args.units * warps_of_unit;
  args.inverse_of_warps = 256 / warps_of_unit + 1;
  args.boxes = gated ? 2 : 1;
  args.box_rows = args.unit_rows / args.boxes;
  const int tiles = divide(gated ? linear.n / 2 : linear.n, halves * args.box_rows);
  *launched = tiles <= kMostClusters[1] && (tiles >= kFewestOfLongK || linear.k <= kLongK);
  if (!kUpTo8) *launched = *launched && parts > 1 && !gated;
  if (!*launched) return Status::Ok();
  args.inverse_of_width = (1 << kInverseShift) / (kUpTo8 ? args.box_rows : args.box_rows / 4) + 1;
  args.weights_first = order == LaunchOrder::kDependent;
  // ---- A stage
  args.columns = args.box_rows < kRowsOfWideBox && linear.k % Config::kChunkK == 0 ? 2 : 1;
  args.column_bytes = args.box_rows * 128;
  args.half_bytes = gated ? args.columns * args.column_bytes : args.unit_rows / 2 * 128;
  args.x_rows = kUpTo8 || Config::kRowTile > 32 ? linear.rows : Config::kRowTile;
  args.rounds = divide(divide(args.chunks, parts), args.columns);
  args.launch_at = std::max(args.rounds - 1 - (gated ? kEarlyChunks / args.columns : 0), 0);
  // ---- Shared memory
  const int stage_bytes = (args.unit_rows + args.x_rows) * 128 * args.columns;
  const int sum_bytes = kUpTo8 ? parts * linear.rows * FewSumPitch(args.unit_rows) * 4 : 0;
  const int bytes =
      !kUpTo8 ? kFewMostBytes : BytesBesideNext(gated, order, parts == 1 ? tiles : 0, halves * args.unit_rows);
  // Warps read all rows of a row tile: behind the last stage's x what comes behind it.
  const int past_x = kUpTo8 ? 0 : (Config::kRowTile - args.x_rows) * 128;
  args.weight_stages =
      std::min({Config::kMaxStages, (bytes - std::max(past_x, Config::kBarrierBytes) - sum_bytes) / stage_bytes,
                args.rounds * args.units});
  args.slots = divide(args.weight_stages, args.units);
  const auto encode = [&](const void* start, int rows, int64_t row_bytes, int box_rows, CUtensorMap* map) {
    return args.columns == 1 ? EncodeMatrix(start, rows, row_bytes, box_rows, map)
                             : EncodeMatrixColumns(start, rows, row_bytes, box_rows, args.columns, map);
  };
  if (!encode(linear.weight, linear.n, linear.weight_row_bytes, args.box_rows, &args.weight_map) ||
      !encode(linear.x, linear.rows, int64_t{linear.k} * 2, args.x_rows, &args.x_map)) {
    return Status::Internal(
        "linear: no tensor map of weight or x: expected memory aligned to 16 bytes, and a driver that has tensor maps");
  }
  // The same for all sizes: another thread may launch this kernel in between.
  XLA_GPU_RETURN_IF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              kUpTo8 ? kMoreThanHalfOfSmBytes : kFewMostBytes));
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  return LaunchClusters(kernel, args, tiles, (args.warps + 2) * 32, bytes, stream);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FEW_LAUNCH_CUH_
