// From the sums of the parts of k to results, in the kernel of sm_90a for int4 weights.
#ifndef XLA_GPU_OPS_LINEAR_SM90_INT4_EPILOGUE_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_INT4_EPILOGUE_CUH_

#include <cstdint>

#include "ffi/device/aligned_vector.h"
#include "ffi/device/cluster.cuh"
#include "ffi/device/mbarrier.cuh"
#include "ffi/ops/linear/epilogue.cuh"
#include "ffi/ops/linear/sm90_epilogue.cuh"
#include "ffi/ops/linear/sm90_features_epilogue.cuh"
#include "ffi/ops/linear/sm90_int4_traits.cuh"

namespace xla_gpu::linear {

// Four neighbouring columns of a row, added over all parts in the order of k: those of a CTA, `part_floats` after one
// another, and the CTAs of the cluster.
__device__ inline void AddInt4Parts(const Sm90Int4Args& args, const float* sums, int part_floats, float (&total)[4]) {
  if (args.parts == 1) {
    AddPartials(sums, args.cluster, total);
    return;
  }
  float4 values[8] = {};
  int part = 0, rank = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (rank >= args.cluster) continue;
    const float* const from = sums + part * part_floats;
    values[i] = *reinterpret_cast<const float4*>(args.cluster == 1 ? from : SharedOf(from, rank));
    if (++part == args.parts) part = 0, ++rank;
  }
  total[0] = values[0].x, total[1] = values[0].y, total[2] = values[0].z, total[3] = values[0].w;
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    if (i >= args.parts * args.cluster) continue;
    total[0] += values[i].x;
    total[1] += values[i].y;
    total[2] += values[i].z;
    total[3] += values[i].w;
  }
}

// Finishes this CTA's share of a work tile, by the `threads` threads that have written `sums`, [parts][rows][pitch].
template <typename T>
__device__ __forceinline__ void FinishInt4Tile(const Sm90Int4Args& sm90, int tile, const float* sums, int part_floats,
                                               int pitch, int rank, int threads) {
  const bool gated = sm90.linear.activation != Activation::kNone;
  const int tile_features = gated ? sm90.box_rows : sm90.boxes * sm90.box_rows;
  const ShareOfThread share(sm90, rank, threads);
  const auto wait = [&] { WaitForSums(sm90.cluster, threads); };
  const auto sums_of_columns = [&] { return sums + share.column; };
  const auto add = [&](const float* from, float(&total)[4]) { AddInt4Parts(sm90, from, part_floats, total); };
  FinishRows<T, /*kHasScale=*/false>(sm90.linear, share, tile * tile_features + share.column, pitch, tile_features,
                                     wait, sums_of_columns, add);
}

// The same up to 8 rows, where no other CTA has sums.
template <typename T>
__device__ __forceinline__ void FinishFewRows(const Sm90Int4Args& sm90, int tile, const float* sums, int part_floats,
                                              int pitch, int threads) {
  const bool gated = sm90.linear.activation != Activation::kNone;
  const int tile_features = gated ? sm90.box_rows : sm90.boxes * sm90.box_rows;
  FinishFeatures<T>(sm90.linear, tile * tile_features, tile_features, sm90.inverse_of_features, sm90.parts, sums,
                    part_floats, pitch, threads);
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_INT4_EPILOGUE_CUH_
