// grouped_linear on a GPU: limited by the bandwidth for its weights while groups have few rows.
#include <cuda_runtime.h>

#include <algorithm>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch.cuh"
#include "ffi/ops/grouped_linear/args.h"
#include "ffi/ops/grouped_linear/grouped_linear.h"
#include "ffi/ops/grouped_linear/kernel.cuh"

namespace xla_gpu {
namespace {

using grouped_linear::GroupedArgs;

GroupedArgs MakeGroupedArgs(const GroupedLinearParams& p) {
  GroupedArgs args = {};
  args.x = p.x;
  args.weight = static_cast<const char*>(p.weight);
  args.group_sizes = p.group_sizes;
  args.weight_scale = p.weight_scale;
  args.zero_point = p.zero_point;
  args.bias = p.bias;
  args.out = p.out;
  args.weight_row_bytes = p.format == GroupedFormat::kPlain       ? p.k * static_cast<int64_t>(SizeOf(p.dtype))
                          : grouped_linear::HasFourBits(p.format) ? p.k / 2
                                                                  : p.k;
  args.rows = static_cast<int>(p.rows);
  args.n = static_cast<int>(p.n);
  args.k = static_cast<int>(p.k);
  args.num_groups = static_cast<int>(p.num_groups);
  args.scales =
      static_cast<int>(p.format == GroupedFormat::kMxfp4 ? p.k / kMxfp4Group : (p.k + kQuantGroup - 1) / kQuantGroup);
  args.scale = p.scale;
  return args;
}

template <typename Config>
Status LaunchGroupedRows(const GroupedLinearParams& p, Stream stream) {
  int device, sms, bytes_of_sm, bytes_of_cta;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&bytes_of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&bytes_of_cta, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  GroupedArgs args = MakeGroupedArgs(p);
  args.chunks = static_cast<int>((p.k + Config::kChunkK - 1) / Config::kChunkK);
  args.feature_tiles = static_cast<int>((p.n + Config::kTileN - 1) / Config::kTileN);
  const int64_t row_tiles = p.rows / Config::kRowTile + std::min(p.rows, p.num_groups);
  const int64_t tiles = row_tiles * args.feature_tiles;  // fit an int: 2^30 of them have 1 TB of weights or results
  // As many CTAs of an SM as have three stages each, or one with two; each has 1 KB beside them.
  const int plan_bytes = grouped_linear::PlanBytes(args.num_groups);
  int ctas = Config::kCtas;
  const auto stages_of = [&](int count) {
    const int bytes = std::min(bytes_of_cta - 1024, bytes_of_sm / count - 2048) - plan_bytes;
    return std::min(bytes / Config::kStageBytes, linear::kMaxStages);
  };
  while (ctas > 1 && stages_of(ctas) < 3) --ctas;
  args.stages = stages_of(ctas);
  if (args.stages < 2) return Status::Internal("grouped_linear: this GPU has too little shared memory");
  const int bytes = plan_bytes + args.stages * Config::kStageBytes;
  const auto kernel = grouped_linear::GroupedLinearKernel<Config>;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, int64_t{sms} * ctas));
  return LaunchKernel(kernel, dim3(grid), dim3(Config::kThreads), static_cast<size_t>(bytes), stream,
                      LaunchOrder::kFirst, args);
}

// Rows of a group on average up to which row tiles are of 8 and of 16, else of 64.
inline constexpr int64_t kRowsForTile8 = 4, kRowsForTile16 = 8;

template <typename T, GroupedFormat kFormat>
Status LaunchGroupedFormat(const GroupedLinearParams& p, Stream stream) {
  if (p.rows <= kRowsForTile8 * p.num_groups) {
    return LaunchGroupedRows<grouped_linear::Traits<T, kFormat, 8>>(p, stream);
  }
  if (p.rows <= std::max<int64_t>(16, kRowsForTile16 * p.num_groups)) {
    return LaunchGroupedRows<grouped_linear::Traits<T, kFormat, 16>>(p, stream);
  }
  return LaunchGroupedRows<grouped_linear::Traits<T, kFormat, 64>>(p, stream);
}

template <typename T>
Status LaunchGroupedType(const GroupedLinearParams& p, Stream stream) {
  switch (p.format) {
    case GroupedFormat::kPlain:
      return LaunchGroupedFormat<T, GroupedFormat::kPlain>(p, stream);
    case GroupedFormat::kFloat8:
      return LaunchGroupedFormat<T, GroupedFormat::kFloat8>(p, stream);
    case GroupedFormat::kInt8:
      return LaunchGroupedFormat<T, GroupedFormat::kInt8>(p, stream);
    case GroupedFormat::kInt4:
      return LaunchGroupedFormat<T, GroupedFormat::kInt4>(p, stream);
    case GroupedFormat::kMxfp4:
      break;
  }
  return LaunchGroupedFormat<T, GroupedFormat::kMxfp4>(p, stream);
}

}  // namespace

Status LaunchGroupedLinear(const GroupedLinearParams& params, Stream stream) {
  if (params.rows == 0) return Status::Ok();
  return params.dtype == DType::kF16 ? LaunchGroupedType<__half>(params, stream)
                                     : LaunchGroupedType<__nv_bfloat16>(params, stream);
}

}  // namespace xla_gpu
