// Which kernel of sm_90a multiplies by a weight of a format, for as many rows as there are.
#ifndef XLA_GPU_OPS_LINEAR_SM90_TILE_LAUNCH_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_TILE_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "ffi/base/status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/ops/linear/sm90_converted_launch.cuh"
#include "ffi/ops/linear/sm90_few_launch.cuh"
#include "ffi/ops/linear/sm90_float8_launch.cuh"
#include "ffi/ops/linear/sm90_int4_launch.cuh"
#include "ffi/ops/linear/sm90_launch.cuh"

namespace xla_gpu::linear {

// Each of these leaves `launched` false where its kernels do not run on this GPU, or not for these sizes. Row tiles
// between 8, 32 and 64: a product's columns, its rows of x and its sums are as few as its rows.

template <typename T, int kRowTile>
Status LaunchPlainSm90(const LinearArgs& args, Stream stream, LaunchOrder order, bool* launched) {
  Status status;
  if constexpr (kRowTile == 8) {
    status = LaunchFewSm90<FewTraits<T, 8>>(args, stream, order, launched);
  } else if (args.rows <= 16) {
    status = LaunchFewSm90<FewTraits<T, 16>>(args, stream, order, launched);
  } else if (args.rows <= 32) {
    status = LaunchFewSm90<FewTraits<T, 32>>(args, stream, order, launched);
  } else if (args.rows <= 48) {
    status = LaunchFewSm90<FewTraits<T, 48>>(args, stream, order, launched);
  }
  if (!status.ok() || *launched) return status;
  using Config = Sm90Traits<T, kRowTile>;
  status = RunsSm90a(LinearSm90Kernel<Config>, Config::kThreads, launched);
  if (!status.ok() || !*launched) return status;
  return LaunchSm90<Config>(args, stream, order);
}

// Up to 32 rows. From 17 on wgmma is faster where one CTA has all of k.
template <typename T, int kRowTile>
Status LaunchTileInt4Sm90(const LinearArgs& args, Stream stream, LaunchOrder order, bool* launched) {
  if constexpr (kRowTile == 8) {
    return HasWideWarps(args) ? LaunchInt4Sm90<Int4Traits<T, 8, 2>>(args, stream, order, launched)
                              : LaunchInt4Sm90<Int4Traits<T, 8, 1>>(args, stream, order, launched);
  } else {
    static_assert(kRowTile == 32);
    if (args.rows <= 16) return LaunchInt4Sm90<Int4Traits<T, 16>>(args, stream, order, launched);
    if (Int4Parts(args) == 1) return Status::Ok();
    return args.rows <= 24 ? LaunchInt4Sm90<Int4Traits<T, 24>>(args, stream, order, launched)
                           : LaunchInt4Sm90<Int4Traits<T, 32>>(args, stream, order, launched);
  }
}

// Of bfloat16, with scales of the tensor or of channels.
template <int kRowTile>
Status LaunchTileFloat8Sm90(const LinearArgs& args, Stream stream, LaunchOrder order, bool* launched) {
  if (kRowTile == 32 && args.rows <= 16) return LaunchFloat8Sm90<Float8Traits<16>>(args, stream, order, launched);
  if (kRowTile == 32 && args.rows <= 24) return LaunchFloat8Sm90<Float8Traits<24>>(args, stream, order, launched);
  if (kRowTile == 64 && args.rows <= 48) return LaunchFloat8Sm90<Float8Traits<48>>(args, stream, order, launched);
  return LaunchFloat8Sm90<Float8Traits<kRowTile>>(args, stream, order, launched);
}

template <typename T, WeightFormat kFormat, int kRowTile>
Status LaunchTileConvertedSm90(const LinearArgs& args, Stream stream, LaunchOrder order, bool* launched) {
  if (kRowTile == 32 && args.rows <= 24)
    return LaunchConvertedSm90<ConvertedTraits<T, kFormat, 24>>(args, stream, order, launched);
  if (kRowTile == 64 && args.rows <= 48)
    return LaunchConvertedSm90<ConvertedTraits<T, kFormat, 48>>(args, stream, order, launched);
  return LaunchConvertedSm90<ConvertedTraits<T, kFormat, kRowTile>>(args, stream, order, launched);
}

template <typename T, WeightFormat kFormat, int kRowTile>
Status LaunchTileSm90(const LinearArgs& args, Stream stream, LaunchOrder order, bool* launched) {
  constexpr bool kInt4 = kFormat == WeightFormat::kInt4;
  if constexpr (kFormat == WeightFormat::kPlain) {
    return LaunchPlainSm90<T, kRowTile>(args, stream, order, launched);
  } else if constexpr (kInt4 && kRowTile == 8) {
    return LaunchTileInt4Sm90<T, kRowTile>(args, stream, order, launched);
  } else {
    Status status;
    if constexpr (kInt4 && kRowTile == 32) {
      status = LaunchTileInt4Sm90<T, kRowTile>(args, stream, order, launched);
    } else if constexpr (kFormat == WeightFormat::kFloat8 && std::is_same_v<T, __nv_bfloat16>) {
      if (args.scale != WeightScale::kBlock) status = LaunchTileFloat8Sm90<kRowTile>(args, stream, order, launched);
    }
    if (!status.ok() || *launched) return status;
    if (args.x_is_split) {
      return Status::Internal(
          "linear: x: split by a norm, for the kernel of sm_90a for float8 weights, which does not run");
    }
    return LaunchTileConvertedSm90<T, kFormat, kRowTile>(args, stream, order, launched);
  }
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_TILE_LAUNCH_CUH_
