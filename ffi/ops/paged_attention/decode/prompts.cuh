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

// The prefill path's sequences, where DecodeArgs::prompt_sms is set: how many there are, their work tiles and the key
// tiles of these.
struct PromptExtent {
  uint32_t prompts;
  uint32_t work_tiles;
  uint32_t key_tiles;

  // Of a sequence, which may belong to the decode path. No work tiles where these take unequal times, since most keys
  // are of the prompt itself; or where keys are split: the prefill path's combine kernel then comes last, and starts
  // too late where this path's has something to do.
  __device__ static PromptExtent Of(const DecodeArgs& args, const SequenceMetadata& metadata) {
    constexpr unsigned kTileRows = 192, kTileKeys = prefill::SplitKvPolicy::TileKeys(128);
    const unsigned tokens = static_cast<unsigned>(metadata.q_end) - static_cast<unsigned>(metadata.q_begin);
    const unsigned keys = static_cast<unsigned>(metadata.context_len);
    if (tokens <= static_cast<unsigned>(args.max_tokens)) return {0, 0, 0};
    if (tokens >= 1u << 16 || keys >= 1u << 20 || 2 * tokens > keys) return {1, 0, 0};
    if (PromptSplits(args, PromptPolicy(args), static_cast<int>(tokens), static_cast<int>(keys)) > 1) return {1, 0, 0};
    const unsigned tiles = (tokens * static_cast<unsigned>(args.group_size) + kTileRows - 1) / kTileRows *
                           static_cast<unsigned>(args.params.num_kv_heads);
    return {1, tiles, tiles * ((keys - tokens / 2) / kTileKeys + 1)};
  }
  __device__ PromptExtent operator+(const PromptExtent& other) const {
    return {prompts + other.prompts, work_tiles + other.work_tiles, key_tiles + other.key_tiles};
  }
  // Over the lanes of a warp.
  __device__ PromptExtent OfWarp() const {
    return {__reduce_add_sync(0xffffffffu, prompts), __reduce_add_sync(0xffffffffu, work_tiles),
            __reduce_add_sync(0xffffffffu, key_tiles)};
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_PROMPTS_CUH_
