// The rows that no sequence owns (sequence_metadata.cuh): 0 and -infinity where the batch is padded, before its
// first sequence or after its last, NaN where wrong metadata left them without an owner.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PADDING_ROWS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PADDING_ROWS_CUH_

#include <math_constants.h>

#include <cstdint>

#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu {

// What becomes of rows without an owner. Built by all threads of a block together.
class UnownedRows {
 public:
  enum class Fill { kNone, kZero, kNan };  // kNone: the row has an owner

  __device__ explicit UnownedRows(const PagedAttentionParams& params)
      : params_(params), num_live_(LiveSequences(params)), in_order_(QueryStartsInOrder(params, max(num_live_, 0))) {
    padding_begin_ = num_live_ < 0 ? -1 : __ldg(params.query_start_loc + num_live_);
    if (padding_begin_ < 0) padding_begin_ = params.num_tokens;
  }

  __device__ Fill Of(int64_t token) const {
    if (IsOwned(token)) return Fill::kNone;
    const bool sound = in_order_ && num_live_ >= 0;  // then the row stands before the first sequence or behind the last
    return token >= padding_begin_ || sound ? Fill::kZero : Fill::kNan;
  }

 private:
  __device__ bool IsOwned(int64_t token) const {
    if (num_live_ <= 0) return false;
    if (in_order_) return token >= __ldg(params_.query_start_loc) && token < padding_begin_;
    int32_t latest = 0;  // of the entries so far that lie in [0, num_tokens]
    for (int32_t s = 0; s < num_live_; ++s) {
      const int32_t begin = __ldg(params_.query_start_loc + s);
      const int32_t end = __ldg(params_.query_start_loc + s + 1);
      if (begin >= latest && begin <= token && token < end && end <= params_.num_tokens) return true;
      if (begin <= params_.num_tokens) latest = max(latest, begin);
    }
    return false;
  }

  const PagedAttentionParams& params_;
  const int32_t num_live_;
  const bool in_order_;
  int64_t padding_begin_;
};

// Writes `value` to `heads` rows of out as [num_tokens * num_heads, head_dim], from `row` on, and `lse` to theirs, by
// one warp.
template <typename T>
__device__ void FillHeads(const PagedAttentionParams& params, int64_t row, int64_t heads, float value, float lse) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* const out = static_cast<T*>(params.out) + row * params.head_dim;
  // head_dim is a multiple of 8: packs of 8 elements, whose address is a multiple of 16 bytes.
  struct alignas(16) Pack {
    T values[8];
  } pack;
#pragma unroll
  for (int i = 0; i < 8; ++i) pack.values[i] = static_cast<T>(value);
  const int packs = static_cast<int>(heads * params.head_dim / 8);
  for (int i = lane; i < packs; i += 32) reinterpret_cast<Pack*>(out)[i] = pack;
  if (params.lse == nullptr) return;
  for (int i = lane; i < static_cast<int>(heads); i += 32) params.lse[row + i] = lse;
}

// Fills the rows without an owner, as block `part` of `parts`.
template <typename T>
__device__ void FillUnownedRows(const PagedAttentionParams& params, unsigned part, unsigned parts) {
  const UnownedRows unowned(params);
  const unsigned warps = blockDim.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // A warp looks at 32 tokens at once: with metadata out of order that is a search.
  const int64_t step = static_cast<int64_t>(parts) * warps * 32;
  int64_t base = (static_cast<int64_t>(part) * warps + threadIdx.x / 32) * 32;
  for (; base < params.num_tokens; base += step) {
    const int64_t token = base + lane;
    const auto fill = token < params.num_tokens ? unowned.Of(token) : UnownedRows::Fill::kNone;
    const unsigned zero = __ballot_sync(~0u, fill == UnownedRows::Fill::kZero);
    const unsigned nan = __ballot_sync(~0u, fill == UnownedRows::Fill::kNan);
    for (unsigned left = zero | nan; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const bool is_zero = (zero >> i & 1) != 0;
      FillHeads<T>(params, (base + i) * params.num_heads, params.num_heads, is_zero ? 0.0f : CUDART_NAN_F,
                   is_zero ? -CUDART_INF_F : CUDART_NAN_F);
    }
  }
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PADDING_ROWS_CUH_
