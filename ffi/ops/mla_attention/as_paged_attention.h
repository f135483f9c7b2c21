// A cache of latents is a cache of keys whose values lie in them: each latent is the key of all query heads.
#ifndef XLA_GPU_OPS_MLA_ATTENTION_AS_PAGED_ATTENTION_H_
#define XLA_GPU_OPS_MLA_ATTENTION_AS_PAGED_ATTENTION_H_

#include <cstdint>

#include "ffi/ops/mla_attention/mla_attention.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::mla {

// Query heads that share a tile of the host: the largest divisor of num_heads up to 16. More would leave too few tiles
// for the threads. Where 16 divides a device's share of a model's heads, its tiles and their bits are one device's.
inline int64_t HeadsPerTile(int64_t num_heads) {
  int64_t heads = 16;
  while (num_heads % heads != 0) --heads;
  return heads;
}

// For the host's tiles, and for the checks of the metadata: kv heads that all lie at the same place.
inline PagedAttentionCall AsPagedAttention(const MlaAttentionParams& params) {
  PagedAttentionCall call{};
  call.query = params.query;
  call.k_cache = params.kv_cache;
  call.v_cache = params.kv_cache;
  call.context_lens = params.context_lens;
  call.block_tables = params.block_tables;
  call.query_start_loc = params.query_start_loc;
  call.num_seqs = params.num_seqs;
  call.out = params.out;
  call.lse = params.lse;
  call.page_stride = params.page_size * params.head_dim;
  call.slot_stride = params.head_dim;
  call.head_stride = 0;
  call.num_tokens = params.num_tokens;
  call.num_heads = params.num_heads;
  call.num_kv_heads = params.num_heads / HeadsPerTile(params.num_heads);
  call.head_dim = params.head_dim;
  call.value_dim = params.value_dim;
  call.num_pages = params.num_pages;
  call.page_size = params.page_size;
  call.max_seqs = params.max_seqs;
  call.pages_per_seq = params.pages_per_seq;
  call.scale = params.scale;
  call.dtype = params.dtype;
  call.cache_dtype = params.dtype;
  return call;
}

}  // namespace xla_gpu::mla

#endif  // XLA_GPU_OPS_MLA_ATTENTION_AS_PAGED_ATTENTION_H_
