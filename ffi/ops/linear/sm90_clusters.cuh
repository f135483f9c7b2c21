// What the launches of the kernels of sm_90a share: how many CTAs divide k, the tensor maps, a launch in clusters.
#ifndef XLA_GPU_OPS_LINEAR_SM90_CLUSTERS_CUH_
#define XLA_GPU_OPS_LINEAR_SM90_CLUSTERS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch_order.h"
#include "ffi/device/stream.h"
#include "ffi/device/tma_matrix.cuh"
#include "ffi/ops/linear/sm90_traits.cuh"

namespace xla_gpu::linear {

// Clusters of a number of CTAs, each with an SM, that an H200 has room for at once, as cudaOccupancyMaxActiveClusters
// says (15 of 8 on some). Constants: the parts of k, and so the bits, are the same on every GPU.
inline constexpr int kMostClusters[9] = {0, 132, 66, 39, 30, 22, 17, 15, 14};

constexpr int DivideUp(int value, int by) { return value / by + (value % by != 0); }

// The number of CTAs that divide the chunks of k: as many as leave no SM with two of them, each with two chunks.
constexpr int ClusterSize(int tiles, int chunks) {
  int cluster = 8;
  while (cluster > 1 && (tiles > kMostClusters[cluster] || chunks < 2 * cluster)) --cluster;
  return cluster;
}

// The parts of k of a product with plain or float8 weights, [n, k], k in `chunks`: those of work tiles of so many
// features, whatever a kernel's are.
inline constexpr int kFeaturesOfParts = 256;
constexpr int PartsOfK(int n, int chunks) { return ClusterSize(DivideUp(n, kFeaturesOfParts), chunks); }

// The parts of k, and so the bits, depend on n and k alone. Not five: clusters of two do not divide them, and up to 8
// rows so many warps have fewer features than lets each CTA have an SM.
inline int Int4Parts(const LinearArgs& linear) {
  const bool gated = linear.activation != Activation::kNone;
  const int out_features = gated ? linear.n / 2 : linear.n, features = gated ? 128 : 256;
  const int parts = ClusterSize(DivideUp(out_features, features), DivideUp(linear.k, 256));
  return parts == 5 ? 4 : parts;
}

// Whether the current device runs code for sm_90a: a kernel is empty, of one warp, in code for other targets.
template <typename Args>
Status RunsSm90a(void (*kernel)(Args), int threads, bool* runs) {
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, kernel));
  *runs = code.maxThreadsPerBlock >= threads;
  return Status::Ok();
}

inline Status NoTensorMap() {
  return Status::Internal(
      "linear: no tensor map of weight or x: expected memory aligned to 16 bytes, and a driver that has tensor maps");
}

// The tensor maps of args->linear's weight, in boxes of `box_rows`, and of its x.
inline Status EncodeMaps(int box_rows, int row_tile, Sm90Args* args) {
  const LinearArgs& linear = args->linear;
  const bool encoded =
      EncodeMatrix(linear.weight, static_cast<uint64_t>(linear.n), static_cast<uint64_t>(linear.weight_row_bytes),
                   static_cast<uint32_t>(box_rows), &args->weight_map) &&
      EncodeMatrix(linear.x, static_cast<uint64_t>(linear.rows), static_cast<uint64_t>(linear.k) * 2,
                   static_cast<uint32_t>(row_tile), &args->x_map);
  return encoded ? Status::Ok() : NoTensorMap();
}

// Lets a kernel have so much dynamic shared memory. The same for all sizes of a kernel: another thread may launch it in
// between.
template <typename Args>
Status AllowSharedMemory(void (*kernel)(Args), int bytes) {
  XLA_GPU_RETURN_IF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  XLA_GPU_RETURN_IF_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  return Status::Ok();
}

// A cluster for each work tile, launched programmatically.
template <typename Args>
Status LaunchClusters(void (*kernel)(Args), const Args& args, int tiles, int threads, int shared_bytes, Stream stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(args.cluster), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(tiles * args.cluster));
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = 2;
  XLA_GPU_RETURN_IF_CUDA(cudaLaunchKernelEx(&launch, kernel, args));
  return Status::Ok();
}

// Of a kernel for up to 8 rows, the dynamic shared memory of a CTA at most. One of a gated product and one of the next
// product fit an SM, but not two of the latter: a grid that starts while the one in front ends would otherwise have
// some SMs with two of its CTAs, and wait for those. So would a gated product of nearly all SMs behind another call.
// tiles: of `features` that have all of k, or 0.
inline int BytesBesideNext(bool gated, LaunchOrder order, int tiles, int features) {
  constexpr int kManyFeatures = 192;  // with fewer it lost up to 14 %
  const bool alone =
      order == LaunchOrder::kFirst && tiles > 0 && tiles <= kMostClusters[1] && features >= kManyFeatures;
  return gated && !alone ? kHalfOfSmBytes : kMoreThanHalfOfSmBytes;
}

// Divides the columns of a work tile's results among the CTAs of its cluster, in fours.
inline void DivideColumns(int columns, Sm90Args* args) {
  for (int i = 0; i <= args->cluster; ++i) args->column_begin[i] = columns / 4 * i / args->cluster * 4;
}

}  // namespace xla_gpu::linear

#endif  // XLA_GPU_OPS_LINEAR_SM90_CLUSTERS_CUH_
