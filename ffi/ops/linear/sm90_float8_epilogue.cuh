// From the partial sums of a cluster's CTAs to results, for the kernel of sm_90a that multiplies float8: as
// FinishWorkTile, with work tiles of any size.
#ifndef XLA_GPU_OPS_LINEAR_SM90_FLOAT8_EPILOGUE_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_FLOAT8_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/device/aligned_vector.h"
#include "ffi/device/cluster.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/linear/epilogue.cuh"
#include "ffi/ops/linear/sm90_epilogue.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// Finishes this CTA's share of its cluster's work tile, by the kThreads threads that have written `sums`,
// [rows][SumPitch] in each CTA's shared memory, with `box_rows` columns from each of the columns 0 and kTileFeatures /
// 2 on.
template <typename T, int kTileFeatures, int kThreads>
__device__ __forceinline__ void FinishBoxes(const Sm90Args& sm90, int tile, const float* sums, int rank) {
  const bool gated = sm90.linear.activation != Activation::kNone;
  const int tile_features = gated ? sm90.box_rows : 2 * sm90.box_rows;
  const ShareOfThread share(sm90, rank, kThreads);
  const int column = share.column;
  const auto wait = [&] { WaitForSums(sm90.cluster, kThreads); };
  const auto sums_of_columns = [&] {
    const int second_box = !gated && column >= sm90.box_rows;
    return sums + column + second_box * (kTileFeatures / 2 - sm90.box_rows);
  };
  const auto add = [&](const float* from, float(&total)[4]) { AddPartials(from, sm90.cluster, total); };
  FinishRows<T, /*kHasScale=*/true>(sm90.linear, share, tile * tile_features + column, SumPitch(kTileFeatures),
                                    kTileFeatures / 2, wait, sums_of_columns, add);
}

// The same with few rows: a feature of a row by each thread, and little code, since it runs once and is not in the
// instruction cache.
template <typename T, int kTileFeatures, int kThreads>
__device__ __forceinline__ void FinishFewBoxes(const Sm90Args& sm90, int tile, const float* sums, int rank) {
  const LinearArgs& args = sm90.linear;
  const bool gated = args.activation != Activation::kNone;
  const int out_features = gated ? args.n / 2 : args.n;
  const int tile_features = gated ? sm90.box_rows : 2 * sm90.box_rows;
  const int begin = sm90.column_begin[rank], width = sm90.column_begin[rank + 1] - begin;
  int row = 0, column = static_cast<int>(threadIdx.x);
  while (column >= width && row < args.rows) column -= width, ++row;
  column += begin;
  const int feature = tile * tile_features + column;
  const bool has_result = row < args.rows && feature < out_features;
  const int64_t at = static_cast<int64_t>(row) * out_features + feature;
  float scale = 1.0f, factor_scale = 1.0f, bias = 0.0f, factor_bias = 0.0f, residual = 0.0f;
  if (has_result) {
    const auto* const scales = static_cast<const float*>(args.weight_scale);
    const auto* const biases = static_cast<const T*>(args.bias);
    if (args.scale != WeightScale::kNone) {
      const bool channel = args.scale == WeightScale::kChannel;
      scale = scales[channel ? feature : 0];
      if (gated) factor_scale = scales[channel ? out_features + feature : 0];
    }
    if (biases != nullptr) {
      bias = static_cast<float>(biases[feature]);
      if (gated) factor_bias = static_cast<float>(biases[out_features + feature]);
    }
    if (args.residual != nullptr) residual = static_cast<float>(static_cast<const T*>(args.residual)[at]);
  }
  if (sm90.cluster > 1) {
    ClusterSyncOwnShared();
  } else {
    NamedBarrierSync(1, kThreads);
  }
  if (!has_result) return;
  const int second_box = !gated && column >= sm90.box_rows ? kTileFeatures / 2 - sm90.box_rows : 0;
  const float* const from = sums + row * SumPitch(kTileFeatures) + column + second_box;
  float value = Round<T>(AddPartial(from, sm90.cluster) * scale + bias);
  if (gated) {
    const float factor = Round<T>(AddPartial(from + kTileFeatures / 2, sm90.cluster) * factor_scale + factor_bias);
    value = Round<T>(ActivationOf<T>(args.activation, value) * factor);
  }
  if (args.residual != nullptr) value += residual;  // not 0, which would make 0 of -0
  static_cast<T*>(args.out)[at] = static_cast<T>(value);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_FLOAT8_EPILOGUE_CUH_
