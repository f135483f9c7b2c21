// Which CTAs of the prefill kernel do the split-KV kernel's work, where it does both (PrefillAndDecodeTmaKernel).
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_DECODE_SHARE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_DECODE_SHARE_CUH_

#include <cstdint>

#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/prefill/persistent_tile_scheduler.cuh"
#include "ffi/ops/paged_attention/prefill/split_kv.h"

namespace xla_gpu::prefill {

// CTAs of the split-KV kernel that a CTA stands for.
inline constexpr int kDecodeCtas = 2;

// The CTAs from `first_cta` on. If 0, all: each behind its own work tiles.
struct DecodeShare {
  unsigned first_cta;
  int cta_groups;  // that the KV-block space is divided among

  // By a warp, a sequence to a lane, of up to kWarpPlannedSequences. The prefill kernel, which has `ctas` CTAs, and the
  // combine kernel find the same from the same metadata, whatever they hold. It changes no bits: splits follow from the
  // sequence alone.
  __device__ static DecodeShare Of(const decode::DecodeArgs& args, const SplitKvPolicy& policy,
                                   const ThreadMetadata& metadata, unsigned ctas) {
    constexpr unsigned kMost = 1u << 12;  // no overflow below
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const auto heads = static_cast<unsigned>(policy.kv_heads);
    const unsigned tokens = static_cast<unsigned>(metadata.q_end) - static_cast<unsigned>(metadata.q_begin);
    const bool live = lane < metadata.num_seqs && tokens - 1 < static_cast<unsigned>(args.num_tokens);
    const auto keys = static_cast<unsigned>(metadata.context_len) <= args.max_context_len ? metadata.context_len : 0;
    const bool decodes = live && tokens <= static_cast<unsigned>(args.max_tokens);
    const unsigned rows = tokens * static_cast<unsigned>(policy.group);

    // ---- Work tiles of the prefill path, if all their splits are, and key tiles of the longest
    unsigned tiles = 0, longest = 0;
    if (live && !decodes) {
      const unsigned key_tiles = keys > 0 ? policy.tile_keys.Divide(static_cast<unsigned>(keys) - 1) + 1 : 0;
      const unsigned splits = max(policy.CountOf(static_cast<int>(tokens), keys, key_tiles), 1u);
      tiles = min((rows + SplitKvPolicy::kSmallTileRows - 1) / SplitKvPolicy::kSmallTileRows, kMost) * splits;
      longest = min((key_tiles + splits - 1) / splits, kMost);
    }
    const unsigned busy = __reduce_add_sync(~0u, tiles) * heads;
    if (busy >= ctas) return {0, args.num_cta_groups};

    // ---- KV blocks of the decode path, of all heads
    const unsigned blocks = ((static_cast<unsigned>(max(keys, 1)) - 1) >> args.block_keys_log2) + 1;
    const unsigned row_tiles = ((rows - 1) >> args.tile_rows_log2) + 1;
    const unsigned all_blocks = __reduce_add_sync(~0u, decodes ? min(blocks, kMost) * row_tiles : 0) * heads;

    // ---- Until the last CTA ends, in eighths of a microsecond of an H200: if CTAs without a work tile do it, and if
    // all do, behind their work tiles
    constexpr unsigned kWorkTile = 40, kKeyTile = 11, kBlock = 9;
    const unsigned idle = ctas - busy;
    const unsigned by_idle = all_blocks / (kDecodeCtas * idle) * kBlock;
    const unsigned by_all =
        kWorkTile + __reduce_max_sync(~0u, longest) * kKeyTile + all_blocks / (kDecodeCtas * ctas) * kBlock;
    const int groups = min(static_cast<int>(kDecodeCtas * idle) / args.cta_group_size, args.num_cta_groups);
    if (busy == 0 || by_idle > by_all || groups == 0) return {0, args.num_cta_groups};
    return {busy, groups};
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_DECODE_SHARE_CUH_
