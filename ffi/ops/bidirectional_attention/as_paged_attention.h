// Keys and values as they lie in memory are a paged cache: each sequence has one page, which begins at its first row.
#ifndef XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_AS_PAGED_ATTENTION_H_
#define XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_AS_PAGED_ATTENTION_H_

#include <algorithm>
#include <cstdint>

#include "ffi/ops/bidirectional_attention/bidirectional_attention.h"
#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::bidirectional {

// `context_lens`: [max_seqs], the sequences' tokens.
inline PagedAttentionCall AsPagedAttention(const BidirectionalAttentionParams& params, const int32_t* context_lens) {
  PagedAttentionCall call{};
  call.query = params.query;
  call.k_cache = params.key;
  call.v_cache = params.value;
  call.context_lens = context_lens;
  call.block_tables = params.query_start_loc;
  call.query_start_loc = params.query_start_loc;
  call.num_seqs = params.num_seqs;
  call.out = params.out;
  call.page_stride = params.num_kv_heads * params.head_dim;
  call.slot_stride = call.page_stride;
  call.head_stride = params.head_dim;
  call.num_tokens = params.num_tokens;
  call.num_heads = params.num_heads;
  call.num_kv_heads = params.num_kv_heads;
  call.head_dim = params.head_dim;
  call.num_pages = params.num_tokens;
  call.page_size = std::max<int64_t>(params.num_tokens, 1);
  call.max_seqs = params.max_seqs;
  call.pages_per_seq = 1;
  call.scale = params.scale;
  // A larger window hides nothing either, and might overflow where positions are subtracted from it.
  call.sliding_window = std::min(params.sliding_window, params.num_tokens);
  call.soft_cap = params.soft_cap;
  call.dtype = params.dtype;
  call.cache_dtype = params.dtype;
  call.keys_behind = call.sliding_window > 0 ? call.sliding_window - 1 : params.num_tokens;
  return call;
}

}  // namespace xla_gpu::bidirectional

#endif  // XLA_GPU_OPS_BIDIRECTIONAL_ATTENTION_AS_PAGED_ATTENTION_H_
