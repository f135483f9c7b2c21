// What the decode path knows of the prefill path's sequences, beside which or behind which it runs.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PROMPTS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PROMPTS_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/decode/sequence_plan.cuh"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::decode {

// How the prefill path splits the keys of its sequences: what CountOf needs.
__device__ inline prefill::SplitKvPolicy PromptPolicy(const DecodeArgs& args) {
  using Policy = prefill::SplitKvPolicy;
  Policy policy{};
  policy.enabled = true;
  policy.window = args.window;
  policy.group = args.group_size;
  policy.kv_heads = static_cast<int>(args.params.num_kv_heads);
  policy.large_tile_rows = Policy::LargeTileRows(args.params.head_dim);
  policy.one_tile_splits = Policy::SplitsFor(1, policy.kv_heads);
  policy.max_decode_tokens = args.max_tokens;
  policy.max_tokens = INT32_MAX;
  return policy;
}
// The KV splits of a sequence of the prefill path; 0 or 1 where there are none.
__device__ inline unsigned PromptSplits(const DecodeArgs& args, const prefill::SplitKvPolicy& policy, int tokens,
                                        int keys) {
  const auto tile_keys = static_cast<unsigned>(policy.TileKeys(args.params.head_dim));
  return policy.CountOf(tokens, keys, keys > 0 ? (static_cast<unsigned>(keys) - 1) / tile_keys + 1 : 0);
}

// Whether the prefill path, launched before, may split some sequence's keys, and so use the scratch. Called by all
// threads of a CTA. Not inlined: few calls need it.
__device__ __noinline__ inline bool PromptsMayBeSplit(const DecodeArgs& args) {
  const PagedAttentionParams& params = args.params;
  const prefill::SplitKvPolicy policy = PromptPolicy(args);
  bool any = false;
  for (int s = static_cast<int>(threadIdx.x); s < args.max_seqs; s += static_cast<int>(blockDim.x)) {
    const int64_t tokens = int64_t{__ldg(params.query_start_loc + s + 1)} - __ldg(params.query_start_loc + s);
    if (tokens > args.max_tokens && tokens <= policy.kMostTokens) {
      any = any || PromptSplits(args, policy, static_cast<int>(tokens), __ldg(params.context_lens + s)) > 1;
    }
  }
  return __syncthreads_or(any);
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PROMPTS_CUH_
