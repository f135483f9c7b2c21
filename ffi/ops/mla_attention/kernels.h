// The kernels of mla_attention on a GPU. The launches depend on shapes alone.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_KERNELS_H_
#define XLA_GPU_OPS_MLA_ATTENTION_KERNELS_H_

#include "ffi/base/status.h"
#include "ffi/device/stream.h"
#include "ffi/ops/mla_attention/mla_attention.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::mla {

// What paged_attention's functions for metadata and padding rows take: head_dim is that of `out`.
inline PagedAttentionParams MetadataOf(const MlaAttentionParams& params) {
  PagedAttentionParams metadata{};
  metadata.context_lens = params.context_lens;
  metadata.block_tables = params.block_tables;
  metadata.query_start_loc = params.query_start_loc;
  metadata.num_seqs = params.num_seqs;
  metadata.out = params.out;
  metadata.lse = params.lse;
  metadata.num_tokens = params.num_tokens;
  metadata.num_heads = params.num_heads;
  metadata.num_kv_heads = 1;
  metadata.head_dim = params.value_dim;
  metadata.num_pages = params.num_pages;
  metadata.page_size = params.page_size;
  metadata.max_seqs = params.max_seqs;
  metadata.pages_per_seq = params.pages_per_seq;
  metadata.scale = params.scale;
  metadata.dtype = params.dtype;
  metadata.cache_dtype = params.dtype;
  return metadata;
}

// For the shapes in split_layout.h. Whether the current device has the kernel, and the driver what it needs.
Status SuitsSm90BF16(const MlaAttentionParams& params, bool* suits);
Status SuitsSm90F16(const MlaAttentionParams& params, bool* suits);
Status LaunchSm90BF16(const MlaAttentionParams& params, Stream stream);
Status LaunchSm90F16(const MlaAttentionParams& params, Stream stream);

// For every GPU: 16-bit elements by mma.sync, float32 by fused multiply-adds.
Status LaunchPortable16Bit(const MlaAttentionParams& params, Stream stream);
Status LaunchPortableF32(const MlaAttentionParams& params, Stream stream);

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_KERNELS_H_
