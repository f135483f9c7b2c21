// What the shapes of a call say of its sequences. Their lengths are known on the GPU alone.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SEQUENCES_H_
#define XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SEQUENCES_H_

#include <algorithm>
#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention.h"

namespace xla_gpu::prefill {

// The sequences of a call, if they are of one length and their contexts take all the room.
struct Sequences {
  int64_t count, tokens, context;
  bool alike;  // whether they may be of as many tokens each

  explicit Sequences(const PagedAttentionParams& shapes)
      : count(std::max<int64_t>(shapes.max_seqs, 1)),
        tokens((shapes.num_tokens + count - 1) / count),
        context(shapes.pages_per_seq * shapes.page_size),
        alike(count * tokens == shapes.num_tokens) {}
  // Whether they may be several of as many tokens each, a few. Else one of them is probably a chunk of a prompt beside
  // decode rows.
  bool AlikeAndFewTokens() const {
    constexpr int64_t kFewTokens = 48;
    return count > 1 && alike && tokens <= kFewTokens;
  }
  // The same behind a context.
  bool AlikeAndShort() const { return AlikeAndFewTokens() && 2 * tokens < context; }
  // Work tiles of 64 rows, without KV splits.
  int64_t SmallTiles(const PagedAttentionParams& shapes) const {
    return (tokens * (shapes.num_heads / shapes.num_kv_heads) + 63) / 64 * count * shapes.num_kv_heads;
  }
};

}  // namespace xla_gpu::prefill

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PREFILL_SEQUENCES_H_
