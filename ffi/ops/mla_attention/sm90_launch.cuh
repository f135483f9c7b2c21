// Launches of the sm_90a kernels (sm90.cuh, sm90_few_rows.cuh).
#ifndef XLA_GPU_OPS_MLA_ATTENTION_SM90_LAUNCH_CUH_
#define XLA_GPU_OPS_MLA_ATTENTION_SM90_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/launch.cuh"
#include "ffi/device/math_constants.h"
#include "ffi/ops/mla_attention/kernels.h"
#include "ffi/ops/mla_attention/sm90.cuh"
#include "ffi/ops/mla_attention/sm90_combine.cuh"
#include "ffi/ops/mla_attention/sm90_few_rows.cuh"

namespace xla_gpu::mla {

// False where the driver has no tensor maps, or none of these shapes.
inline bool EncodeTensors(const MlaAttentionParams& params, Sm90Params* sm90) {
  const int tile_rows = TileRows(params);
  const bool bfloat16 = params.dtype == DType::kBF16;
  PagedTensor cache;
  cache.start = params.kv_cache;
  cache.columns = kSlotDim;
  cache.page_rows = static_cast<uint64_t>(params.page_size);
  cache.pages = static_cast<uint64_t>(params.num_pages);
  cache.row_stride = kSlotDim;
  cache.page_stride = static_cast<uint64_t>(params.page_size) * kSlotDim;
  cache.box_rows = static_cast<uint32_t>(BoxRows(params.page_size));
  cache.box_columns = tile_rows == kTileRows ? kPieceDim : kPartColumns;
  cache.bfloat16 = bfloat16;
  return EncodePagedTensor(cache, &sm90->cache_map) &&
         EncodeQueryTensor(params.query, static_cast<uint64_t>(params.num_tokens * params.num_heads), /*heads=*/1,
                           kSlotDim, static_cast<uint32_t>(tile_rows), /*box_heads=*/1, bfloat16, &sm90->q_map);
}

template <typename T>
Status SuitsSm90As(const MlaAttentionParams& params, bool* suits) {
  *suits = false;
  // Code for other targets holds an empty kernel of one warp.
  cudaFuncAttributes code;
  XLA_GPU_RETURN_IF_CUDA(cudaFuncGetAttributes(&code, MlaSm90Kernel<T>));
  if (code.maxThreadsPerBlock < kThreads) return Status::Ok();
  Sm90Params sm90;
  *suits = EncodeTensors(params, &sm90);
  return Status::Ok();
}

inline Status LaunchTiles(void (*kernel)(Sm90Params), int threads, int shared_bytes, const Sm90Params& sm90,
                          Stream stream) {
  XLA_GPU_RETURN_IF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  return LaunchKernel(kernel, dim3(static_cast<unsigned>(sm90.ctas)), dim3(static_cast<unsigned>(threads)),
                      static_cast<size_t>(shared_bytes), stream, LaunchOrder::kDependent, sm90);
}

template <typename T>
Status LaunchTilesAs(const Sm90Params& sm90, Stream stream) {
  if (sm90.tile_rows == kTileRows) return LaunchTiles(MlaSm90Kernel<T>, kThreads, kSharedBytes, sm90, stream);
  return LaunchTiles(MlaSm90FewRowsKernel<T>, FewRowsTraits::kThreads, FewRowsTraits::kSharedBytes, sm90, stream);
}

template <typename T>
Status LaunchSm90As(const MlaAttentionParams& params, Stream stream) {
  int device, sms;
  XLA_GPU_RETURN_IF_CUDA(cudaGetDevice(&device));
  XLA_GPU_RETURN_IF_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  Sm90Params sm90;
  if (!EncodeTensors(params, &sm90)) {
    return Status::Internal("mla_attention: the driver makes no tensor maps of query and kv_cache");
  }
  const SplitLayout layout = SplitLayout::Of(params);
  char* const scratch = static_cast<char*>(params.scratch);
  sm90.attention = MetadataOf(params);
  sm90.accumulators = reinterpret_cast<float*>(scratch);
  sm90.states = reinterpret_cast<AttentionState*>(scratch + layout.StatesBegin());
  sm90.split_tiles = reinterpret_cast<SplitTile*>(scratch + layout.TilesBegin());
  sm90.slot_rows = static_cast<int>(layout.rows);
  sm90.tile_rows = TileRows(params);
  sm90.unit_cost = sm90.tile_rows == kTileRows ? kUnitCost : kFewRowsUnitCost;
  // Two row tiles read the same keys at about the same time, the second one from L2.
  sm90.group_ctas = sm90.tile_rows == kTileRows && params.num_heads > kTileRows && params.num_heads % 2 == 0 ? 2 : 1;
  sm90.ctas = std::max(std::min(sms, kMaxCtas) / sm90.group_ctas, 1) * sm90.group_ctas;
  sm90.box_rows = static_cast<int>(BoxRows(params.page_size));
  sm90.heads = FastDivisor::Make(params.num_heads);
  sm90.page = FastDivisor::Make(params.page_size);
  sm90.scale_log2 = params.scale * kLog2E;
  // Keys that one CTA reads, once where sequences have a unit each on average, leave L2 to the accumulators of shared
  // rows.
  const bool read_once =
      sm90.group_ctas == 1 && params.num_tokens * params.num_heads <= sm90.tile_rows * params.max_seqs;
  sm90.keys_policy = read_once ? kEvictFirst : kEvictNormal;
  if (Status status = LaunchTilesAs<T>(sm90, stream); !status.ok()) return status;
  return LaunchKernel(MlaCombineKernel<T>, dim3(static_cast<unsigned>(CombineCtas(sm90))), dim3(kCombineThreads), 0,
                      stream, LaunchOrder::kDependent, sm90, PaddingCtas(sm90));
}

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_SM90_LAUNCH_CUH_
