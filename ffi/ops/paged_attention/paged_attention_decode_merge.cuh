// Partial results of the softmax and how two of them become one. The same few functions serve every place where partial
// results meet (registers, shared memory, another block's shared memory, scratch), so that the bits agree.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_MERGE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_MERGE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_work.cuh"

namespace xla_gpu::decode {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Of one query row over some of its keys: `max` of the scores in units of log2, `sum` of 2^(score - max). The output's
// partial sum beside it is scaled alike. No key: (-inf, 0). A NaN in `sum` spoils the row, as it shall.
struct Softmax {
  float max;
  float sum;
};

// The factors of the two partial outputs, first and second.
struct MergeFactors {
  float first;
  float second;
};

__device__ inline MergeFactors MergeInto(Softmax& first, const Softmax& second) {
  const float max = fmaxf(first.max, second.max);
  const float shift = max == -INFINITY ? 0.0f : max;
  const MergeFactors factors = {Exp2(first.max - shift), Exp2(second.max - shift)};
  first = {max, __fmaf_rn(second.sum, factors.second, __fmul_rn(first.sum, factors.first))};
  return factors;
}

__device__ inline float Merge(float first, float second, const MergeFactors& factors) {
  return __fmaf_rn(second, factors.second, __fmul_rn(first, factors.first));
}

// Merges partial results 0 to kCount - 1 from left to right into (total, sum): softmax(i) and out(i) give the i-th.
// NOTE: the maxima are worked out first, so that all the powers are independent of one another.
template <int kCount, typename SoftmaxAt, typename OutAt>
__device__ inline void MergeAll(const SoftmaxAt& softmax, const OutAt& out, Softmax* total, float2* sum) {
  Softmax parts[kCount];
  float2 outs[kCount];
  float max[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    parts[i] = softmax(i);
    outs[i] = out(i);
    max[i] = i == 0 ? parts[0].max : fmaxf(max[i - 1], parts[i].max);
  }
  MergeFactors factors[kCount];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    const float shift = max[i] == -INFINITY ? 0.0f : max[i];
    factors[i] = {Exp2(max[i - 1] - shift), Exp2(parts[i].max - shift)};
  }
  float total_sum = parts[0].sum;
  *sum = outs[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    total_sum = Merge(total_sum, parts[i].sum, factors[i]);
    *sum = {Merge(sum->x, outs[i].x, factors[i]), Merge(sum->y, outs[i].y, factors[i])};
  }
  *total = {max[kCount - 1], total_sum};
}

// What a row's output is multiplied by in the end; `lse` receives the natural log of its sum.
__device__ inline float Finish(const DecodeArgs& args, Softmax softmax, int head, float* lse) {
  if (softmax.sum == 0.0f) {  // no key seen; a sink alone has no value
    *lse = -INFINITY;
    return 0.0f;
  }
  float correction = 1.0f;
  if (args.params.sinks != nullptr) {
    const MergeFactors factors = MergeInto(softmax, {__fmul_rn(__ldg(args.params.sinks + head), kLog2E), 1.0f});
    correction = factors.first;
  }
  *lse = __fmul_rn(__fadd_rn(softmax.max, log2f(softmax.sum)), kLn2);
  float factor = __fdiv_rn(correction, softmax.sum);
  if (args.params.v_scale != nullptr) {
    factor = __fmul_rn(factor, __ldg(args.params.v_scale + (args.params.scale_per_head ? head / args.group : 0)));
  }
  return factor;
}

// Where row `row` of a unit (its rows are (query, head) pairs, heads first) stands in out and lse.
struct RowPlace {
  int head;
  int64_t at;  // token * num_heads + head

  __device__ static RowPlace Of(const DecodeArgs& args, int q_begin, int kv_head, int row) {
    const int query = row / args.group;
    const int head = kv_head * args.group + (row - query * args.group);
    return {head, (int64_t{q_begin} + query) * args.params.num_heads + head};
  }
};

// Two neighbouring elements of out, the first at an even index.
__device__ inline void StorePair(const DecodeArgs& args, int64_t at, float2 value) {
  if (args.params.dtype == DType::kF32) {
    reinterpret_cast<float2*>(args.params.out)[at / 2] = value;
    return;
  }
  const uint32_t pair =
      args.params.dtype == DType::kBF16 ? Pack<__nv_bfloat16>(value.x, value.y) : Pack<__half>(value.x, value.y);
  reinterpret_cast<uint32_t*>(args.params.out)[at / 2] = pair;
}

// Partial results of one group in the scratch: outputs [rows][head_dim] first, then Softmax pairs.
struct ScratchPlace {
  float* out;        // [head_dim]
  Softmax* softmax;  // [1]

  __device__ static ScratchPlace Of(const DecodeArgs& args, int seq, const SequenceInfo& sequence,
                                    const RowPlace& place, int group) {
    const PagedAttentionParams& params = args.params;
    int64_t row = place.at;
    if (args.slot_by_sequence) {
      row += ((seq - args.seq_begin) * kMaxDecodeRows - sequence.q_begin) * params.num_heads;
    }
    const int64_t at = row * kTeam + group;
    const int64_t all = args.scratch_rows * params.num_heads * kTeam;
    float* const base = static_cast<float*>(params.scratch);
    return {base + at * params.head_dim, reinterpret_cast<Softmax*>(base + all * params.head_dim) + at};
  }
};

// Writes rows [first, last) of a unit that has no partial results: NaN for a bad sequence, 0 for one without keys.
__device__ inline void StoreConstantRows(const DecodeArgs& args, const SequenceInfo& sequence, int kv_head, int first,
                                         int last) {
  const float value = sequence.valid ? 0.0f : NAN;
  const int pairs = static_cast<int>(args.params.head_dim / 2);
  for (int i = threadIdx.x; i < (last - first) * pairs; i += blockDim.x) {
    const RowPlace place = RowPlace::Of(args, sequence.q_begin, kv_head, first + i / pairs);
    StorePair(args, place.at * args.params.head_dim + i % pairs * 2, {value, value});
    if (args.params.lse != nullptr && i % pairs == 0) args.params.lse[place.at] = sequence.valid ? -INFINITY : NAN;
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_MERGE_CUH_
