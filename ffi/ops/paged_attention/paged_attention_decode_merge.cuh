// Partial results of the softmax, how two of them become one, and where they wait for each other. The same few
// functions serve every place where partial results meet, so that the bits agree.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_MERGE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_MERGE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/paged_attention_decode_args.h"

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

// A partial result of a row: its softmax and four neighbouring columns of its output.
struct Partial {
  Softmax softmax;
  float4 out;

  __device__ void Add(const Partial& other) {
    const MergeFactors factors = MergeInto(softmax, other.softmax);
    out = {Merge(out.x, other.out.x, factors), Merge(out.y, other.out.y, factors), Merge(out.z, other.out.z, factors),
           Merge(out.w, other.out.w, factors)};
  }
};

// parts[0].Add(parts[1]), and so on up to part `count` - 1.
// NOTE: the maxima are worked out first, so that all the powers are independent of one another.
template <int kCount>
__device__ inline void MergeParts(Partial (&parts)[kCount], int count) {
  MergeFactors factors[kCount];
  float max = parts[0].softmax.max;
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    if (i >= count) break;
    const float before = max;
    max = fmaxf(max, parts[i].softmax.max);
    const float shift = max == -INFINITY ? 0.0f : max;
    factors[i] = {Exp2(before - shift), Exp2(parts[i].softmax.max - shift)};
  }
  Partial& sum = parts[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    if (i >= count) break;
    const Partial& other = parts[i];
    sum.softmax.sum = Merge(sum.softmax.sum, other.softmax.sum, factors[i]);
    sum.out = {Merge(sum.out.x, other.out.x, factors[i]), Merge(sum.out.y, other.out.y, factors[i]),
               Merge(sum.out.z, other.out.z, factors[i]), Merge(sum.out.w, other.out.w, factors[i])};
  }
  sum.softmax.max = max;
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

// Where row `row` of a sequence and kv head (its rows are (query, head) pairs, heads first) stands in out and lse.
struct RowPlace {
  int head;
  int64_t at;  // token * num_heads + head

  __device__ static RowPlace Of(const DecodeArgs& args, int q_begin, int kv_head, int row) {
    const int query = row / args.group;
    const int head = kv_head * args.group + (row - query * args.group);
    return {head, (int64_t{q_begin} + query) * args.params.num_heads + head};
  }
};

// Writes four columns of a finished row, and its log-sum-exp with the first ones. Queries of 16 bits only.
__device__ inline void StoreRow(const DecodeArgs& args, const RowPlace& place, int column, const Partial& result) {
  const PagedAttentionParams& params = args.params;
  float lse;
  const float factor = Finish(args, result.softmax, place.head, &lse);
  const float4 out = {result.out.x * factor, result.out.y * factor, result.out.z * factor, result.out.w * factor};
  uint2 packed;
  if (params.dtype == DType::kBF16) {
    packed = {Pack<__nv_bfloat16>(out.x, out.y), Pack<__nv_bfloat16>(out.z, out.w)};
  } else {
    packed = {Pack<__half>(out.x, out.y), Pack<__half>(out.z, out.w)};
  }
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + place.at * params.head_dim + column) = packed;
  if (params.lse != nullptr && column == 0) params.lse[place.at] = lse;
}

// The scratch: a job for each worker, then slots of slot_rows rows, all their outputs first, then all their softmaxes.
struct Scratch {
  __device__ static MergeJob* Job(const DecodeArgs& args, unsigned worker) {
    return static_cast<MergeJob*>(args.params.scratch) + worker;
  }
  __device__ static float* Out(const DecodeArgs& args, int64_t slot, int row) {
    return reinterpret_cast<float*>(Job(args, kMaxWorkers)) + (slot * args.slot_rows + row) * args.params.head_dim;
  }
  __device__ static Softmax* Of(const DecodeArgs& args, int64_t slot, int row) {
    return reinterpret_cast<Softmax*>(Out(args, args.slots, 0)) + slot * args.slot_rows + row;
  }
  __device__ static void Store(const DecodeArgs& args, int64_t slot, int row, int column, const Partial& partial) {
    *reinterpret_cast<float4*>(Out(args, slot, row) + column) = partial.out;
    if (column == 0) *Of(args, slot, row) = partial.softmax;
  }
};

// How a group of a unit's chunks was shared out among the workers, from the places of their chunks on the line.
struct GroupPlace {
  unsigned unit_owner;   // of the unit's first chunk
  unsigned first_owner;  // of the group's first chunk
  unsigned last_owner;

  // One worker has it all, and leaves one partial result behind; else each chunk has one.
  __device__ bool Whole() const { return first_owner == last_owner; }

  // The slot of the group, if it is whole, or of chunk `chunk` of the unit, which `owner` computed. A worker has part
  // of at most two groups, one whose beginning it lacks and one whose end; whole groups belong to at most one unit
  // whose beginning it lacks and one whose end.
  __device__ int64_t Slot(const DecodeArgs& args, int64_t unit, int chunk, unsigned owner) const {
    if (args.slots_by_unit) return unit * kMaxChunks + chunk;
    const int in_group = chunk % kGroupChunks;
    const int group = chunk / kGroupChunks;
    int index;
    if (Whole()) {
      index = 2 * kGroupChunks + (unit_owner == owner ? kMaxGroups : 0) + group;
    } else {
      index = (first_owner == owner ? kGroupChunks : 0) + in_group;
    }
    return int64_t{owner} * kWorkerSlots + index;
  }
};
static_assert(kWorkerSlots >= 2 * kGroupChunks + 2 * kMaxGroups, "a slot for every place in Slot()");

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_PAGED_ATTENTION_DECODE_MERGE_CUH_
