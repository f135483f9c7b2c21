// Padding rows: the query rows that no sequence owns (sequence_metadata.cuh). `out` is 0 and `lse` -infinity before the
// first sequence and after the last one. Both are NaN where wrong metadata left a row without an owner.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PADDING_ROWS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PADDING_ROWS_CUH_

#include <math_constants.h>

#include <cstdint>

#include "ffi/device/aligned_vector.h"
#include "ffi/ops/paged_attention/paged_attention.h"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu {

// Finds the padding rows. Built by all threads of a CTA together.
class PaddingRows {
 public:
  enum class Fill { kNone, kZero, kNan };  // kNone: a sequence owns the row

  __device__ explicit PaddingRows(const PagedAttentionParams& params)
      : params_(params), num_live_(LiveSequences(params)), in_order_(QueryStartsInOrder(params, max(num_live_, 0))) {
    padding_begin_ = num_live_ < 0 ? -1 : __ldg(params.query_start_loc + num_live_);
    if (padding_begin_ < 0) padding_begin_ = params.num_tokens;
  }

  __device__ Fill Of(int64_t token) const {
    if (IsOwned(token)) return Fill::kNone;
    // With valid metadata the row stands before the first sequence or after the last one.
    const bool valid = in_order_ && num_live_ >= 0;
    return token >= padding_begin_ || valid ? Fill::kZero : Fill::kNan;
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

// Writes `value` to `heads` rows of out [num_tokens * num_heads, head_dim] from `row` on, and `lse` to the same rows of
// lse. By one warp.
template <typename T>
__device__ void FillHeads(const PagedAttentionParams& params, int64_t row, int64_t heads, float value, float lse) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* const out = static_cast<T*>(params.out) + row * params.head_dim;
  // head_dim is a multiple of 8, and out is aligned to 16 bytes.
  using Vector = AlignedVector<T, 8, 16>;
  Vector vector;
#pragma unroll
  for (int i = 0; i < 8; ++i) vector.values[i] = static_cast<T>(value);
  const int vectors = static_cast<int>(heads * params.head_dim / 8);
  for (int i = lane; i < vectors; i += 32) reinterpret_cast<Vector*>(out)[i] = vector;
  if (params.lse == nullptr) return;
  for (int i = lane; i < static_cast<int>(heads); i += 32) params.lse[row + i] = lse;
}

// Fills the padding rows, as CTA `cta` of `ctas`.
template <typename T>
__device__ void FillPaddingRows(const PagedAttentionParams& params, unsigned cta, unsigned ctas) {
  const PaddingRows padding(params);
  const unsigned warps = blockDim.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // A warp looks at 32 tokens at once, since each is a search where metadata is out of order.
  const int64_t step = static_cast<int64_t>(ctas) * warps * 32;
  int64_t base = (static_cast<int64_t>(cta) * warps + threadIdx.x / 32) * 32;
  for (; base < params.num_tokens; base += step) {
    const int64_t token = base + lane;
    const auto fill = token < params.num_tokens ? padding.Of(token) : PaddingRows::Fill::kNone;
    const unsigned zero = __ballot_sync(~0u, fill == PaddingRows::Fill::kZero);
    const unsigned nan = __ballot_sync(~0u, fill == PaddingRows::Fill::kNan);
    for (unsigned left = zero | nan; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const bool is_zero = (zero >> i & 1) != 0;
      FillHeads<T>(params, (base + i) * params.num_heads, params.num_heads, is_zero ? 0.0f : CUDART_NAN_F,
                   is_zero ? -CUDART_INF_F : CUDART_NAN_F);
    }
  }
}

// Makes the rows of all sequences of more than `max_tokens` new tokens NaN. By one CTA.
template <typename T>
__device__ void FillLongSequences(const PagedAttentionParams& params, int max_tokens) {
  const int32_t num_live = LiveSequences(params);
  const bool in_order = QueryStartsInOrder(params, max(num_live, 0));
  const auto warps = static_cast<int>(blockDim.x / 32);
  for (int32_t s = 0; s < num_live; ++s) {
    const SequenceInfo sequence = LoadSequence(params, s, in_order);
    if (sequence.q_len <= max_tokens) continue;
    for (int row = static_cast<int>(threadIdx.x / 32); row < sequence.q_len; row += warps) {
      FillHeads<T>(params, (int64_t{sequence.q_begin} + row) * params.num_heads, params.num_heads, CUDART_NAN_F,
                   CUDART_NAN_F);
    }
  }
}

}  // namespace xla_gpu

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PADDING_ROWS_CUH_
