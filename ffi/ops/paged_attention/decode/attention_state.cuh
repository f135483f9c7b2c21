// Partial results of the decode path and the order in which they merge. The same functions serve every place where
// partial results meet, so that the bits agree.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ATTENTION_STATE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ATTENTION_STATE_CUH_

#include <cstdint>

#include "ffi/device/attention_state.cuh"
#include "ffi/ops/paged_attention/decode/params.h"

namespace xla_gpu::decode {

// A row's state and four neighbouring columns of its accumulator.
struct PartialState {
  AttentionState state;
  float4 o;

  __device__ void Merge(const PartialState& second) {
    const MergeWeights weights = state.Merge(second.state);
    o = {weights.Merge(o.x, second.o.x), weights.Merge(o.y, second.o.y), weights.Merge(o.z, second.o.z),
         weights.Merge(o.w, second.o.w)};
  }
};

// Merges up to eight partial states of a row from left to right, with the same bits as PartialState::Merge one after
// the other. The weights of all merges are computed at once: lane i computes those of the i-th.
class MergeChain {
 public:
  static constexpr int kMaxPartials = 8;

  // state: lane i has the i-th.
  __device__ explicit MergeChain(const AttentionState& state) : sum_(state.sum), max_(state.max) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 1; i < kMaxPartials; i *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, max_, i);
      if (lane >= i) max_ = fmaxf(max_, before);
    }
    const float before = __shfl_up_sync(0xffffffffu, max_, 1);
    const float shift = max_ == -INFINITY ? 0.0f : max_;
    first_ = Exp2(before - shift);
    second_ = Exp2(state.max - shift);
  }

  // Merges the first `count`. Called by all lanes of a warp. Without branches, which would cost more than they save.
  __device__ PartialState Merge(const float4 (&o)[kMaxPartials], int count) const {
    PartialState merged = {{0.0f, __shfl_sync(0xffffffffu, sum_, 0)}, o[0]};
#pragma unroll
    for (int i = 1; i < kMaxPartials; ++i) {
      const MergeWeights weights = {__shfl_sync(0xffffffffu, first_, i), __shfl_sync(0xffffffffu, second_, i)};
      const float sum = weights.Merge(merged.state.sum, __shfl_sync(0xffffffffu, sum_, i));
      const float4 columns = {weights.Merge(merged.o.x, o[i].x), weights.Merge(merged.o.y, o[i].y),
                              weights.Merge(merged.o.z, o[i].z), weights.Merge(merged.o.w, o[i].w)};
      const bool exists = i < count;
      merged.state.sum = exists ? sum : merged.state.sum;
      merged.o.x = exists ? columns.x : merged.o.x;
      merged.o.y = exists ? columns.y : merged.o.y;
      merged.o.z = exists ? columns.z : merged.o.z;
      merged.o.w = exists ? columns.w : merged.o.w;
    }
    merged.state.max = __shfl_sync(0xffffffffu, max_, max(count - 1, 0));
    return merged;
  }

 private:
  float sum_;     // of this lane's state
  float max_;     // of the states up to this lane's
  float first_;   // the weight of everything before this lane's state
  float second_;  // the weight of this lane's state
};

// Merges partial states in order in two levels: those of a segment one after the other, then the segments.
struct SegmentedMerge {
  PartialState segment;
  PartialState row;
  bool any_in_segment = false;
  bool any_in_row = false;

  __device__ void Add(const PartialState& partial, bool begins_segment) {
    if (!begins_segment) return segment.Merge(partial);
    CloseSegment();
    segment = partial;
    any_in_segment = true;
  }
  __device__ void CloseSegment() {
    if (!any_in_segment) return;
    if (any_in_row) {
      row.Merge(segment);
    } else {
      row = segment;
    }
    any_in_row = true;
  }
};

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ATTENTION_STATE_CUH_
