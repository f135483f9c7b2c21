// The state of the online softmax of one query row over some of its keys, and how the states over two disjoint sets of
// keys become one. FlashInfer calls it the attention state (arXiv:2501.01005). Beside it stands the row's accumulator,
// the sum of exp(score - max) * V, which Merge's weights and Normalize's factor are for.
//
// NOTE: results are promised to the bit whatever else is in a batch, so every kernel merges through these functions.
// Their order of rounding is part of that promise.
#ifndef XLA_GPU_DEVICE_ATTENTION_STATE_CUH_
#define XLA_GPU_DEVICE_ATTENTION_STATE_CUH_

#include "ffi/device/math_constants.h"
#include "ffi/device/mma.cuh"

namespace xla_gpu {

// The exponential of a difference of scores, by the unit of the scores.
struct Log2Scores {
  __device__ static float Exp(float difference) { return Exp2(difference); }
};
struct NaturalScores {
  __device__ static float Exp(float difference) { return expf(difference); }
};
// Scores that `to_log2` turns into units of log2.
struct ScaledScores {
  float to_log2;

  __device__ float Exp(float difference) const { return Exp2(__fmul_rn(difference, to_log2)); }
};

// What the accumulators of two states are multiplied by when they merge.
struct MergeWeights {
  float first;
  float second;

  // Merges an element of the accumulators.
  __device__ float Merge(float first_value, float second_value) const {
    return __fmaf_rn(second_value, second, __fmul_rn(first_value, first));
  }
};

// A row that has seen no key is (-inf, 0), and its accumulator 0. A NaN in `sum` makes the row NaN.
struct AttentionState {
  float max;  // the largest score
  float sum;  // of exp(score - max)

  // Merges `second` into this state.
  template <typename Scores = Log2Scores>
  __device__ MergeWeights Merge(const AttentionState& second, Scores scores = {}) {
    const float largest = fmaxf(max, second.max);
    const float shift = largest == -INFINITY ? 0.0f : largest;  // else the weights of two empty states were NaN
    const MergeWeights weights = {scores.Exp(max - shift), scores.Exp(second.max - shift)};
    *this = {largest, weights.Merge(sum, second.sum)};
    return weights;
  }

  // The natural logarithm of the sum of exp(score), for scores in units of log2.
  __device__ float LogSumExp() const { return __fmul_rn(__fadd_rn(max, log2f(sum)), kLn2); }

  // What turns the accumulator into the row's output, times `scale`. The row has seen a key.
  __device__ float Normalize(float scale) const { return __fdividef(scale, sum); }
};

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_ATTENTION_STATE_CUH_
