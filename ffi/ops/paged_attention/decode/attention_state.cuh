// Partial results of the softmax, how two of them become one, and where they wait for each other. The same few
// functions serve every place where partial results meet, so that the bits agree.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ATTENTION_STATE_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ATTENTION_STATE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/decode/tile_scheduler.cuh"

namespace xla_gpu::decode {

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

// Merges up to eight partial results of a row from left to right, as MergeInto does one after the other, but that the
// factors are worked out side by side: lane i knows the i-th softmax.
class MergeChain {
 public:
  static constexpr int kParts = 8;

  __device__ explicit MergeChain(const Softmax& part) : sum_(part.sum), max_(part.max) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 1; i < kParts; i *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, max_, i);
      if (lane >= i) max_ = fmaxf(max_, before);
    }
    const float before = __shfl_up_sync(0xffffffffu, max_, 1);
    const float shift = max_ == -INFINITY ? 0.0f : max_;
    first_ = Exp2(before - shift);
    second_ = Exp2(part.max - shift);
  }

  // Of the first `count` parts. By all lanes of a warp, and without branches, which would cost more than they save.
  __device__ Partial Merge(const float4 (&outs)[kParts], int count) const {
    Partial all = {{0.0f, __shfl_sync(0xffffffffu, sum_, 0)}, outs[0]};
#pragma unroll
    for (int i = 1; i < kParts; ++i) {
      const MergeFactors factors = {__shfl_sync(0xffffffffu, first_, i), __shfl_sync(0xffffffffu, second_, i)};
      const float sum = decode::Merge(all.softmax.sum, __shfl_sync(0xffffffffu, sum_, i), factors);
      const float4 out = {decode::Merge(all.out.x, outs[i].x, factors), decode::Merge(all.out.y, outs[i].y, factors),
                          decode::Merge(all.out.z, outs[i].z, factors), decode::Merge(all.out.w, outs[i].w, factors)};
      const bool exists = i < count;
      all.softmax.sum = exists ? sum : all.softmax.sum;
      all.out.x = exists ? out.x : all.out.x;
      all.out.y = exists ? out.y : all.out.y;
      all.out.z = exists ? out.z : all.out.z;
      all.out.w = exists ? out.w : all.out.w;
    }
    all.softmax.max = __shfl_sync(0xffffffffu, max_, max(count - 1, 0));
    return all;
  }

 private:
  float sum_;     // of the part
  float max_;     // of the parts up to this lane's
  float first_;   // what all before is multiplied with
  float second_;  // and the part
};

// What belongs to the end of a head's rows.
struct RowEnd {
  float sink;   // in units of log2; -inf: none
  float scale;  // of the values

  __device__ static RowEnd Of(const DecodeArgs& args, int head) {
    const PagedAttentionParams& params = args.params;
    RowEnd end = {-INFINITY, 1.0f};
    if (params.sinks != nullptr) end.sink = __fmul_rn(__ldg(params.sinks + head), kLog2E);
    if (params.v_scale != nullptr) end.scale = __ldg(params.v_scale + (params.scale_per_head ? head / args.group : 0));
    return end;
  }
};

// What a row's output is multiplied by in the end; `lse` receives the natural log of its sum, if it is wanted.
__device__ inline float FinishRow(const DecodeArgs& args, Softmax softmax, const RowEnd& end, float* lse) {
  if (softmax.sum == 0.0f) {  // no key seen; a sink alone has no value
    *lse = -INFINITY;
    return 0.0f;
  }
  float factor = end.scale;
  if (args.params.sinks != nullptr) factor = __fmul_rn(factor, MergeInto(softmax, {end.sink, 1.0f}).first);
  if (args.params.lse != nullptr) *lse = __fmul_rn(__fadd_rn(softmax.max, log2f(softmax.sum)), kLn2);
  return __fdividef(factor, softmax.sum);
}

// Where row `row` of a sequence and kv head (its rows are (query, head) pairs, heads first) stands in out and lse.
struct RowPlace {
  int head;
  int64_t at;  // token * num_heads + head

  __device__ static RowPlace Of(const DecodeArgs& args, int q_begin, int kv_head, int row) {
    const int query = args.QueryOf(row);
    const int head = kv_head * args.group + (row - query * args.group);
    return {head, (int64_t{q_begin} + query) * args.params.num_heads + head};
  }
};

// Where a row goes, and what belongs to its end.
struct RowStore {
  uint16_t* out;  // queries of 16 bits only
  float* lse;     // null: not wanted
  RowEnd end;

  __device__ static RowStore Of(const DecodeArgs& args, const RowPlace& place) {
    const PagedAttentionParams& params = args.params;
    return {static_cast<uint16_t*>(params.out) + place.at * params.head_dim,
            params.lse == nullptr ? nullptr : params.lse + place.at, RowEnd::Of(args, place.head)};
  }
};

// Writes four columns of a finished row, and its log-sum-exp with the first ones, if `write`.
__device__ inline void StoreRow(const DecodeArgs& args, const RowStore& store, int column, const Partial& result,
                                bool write = true) {
  float lse;
  const float factor = FinishRow(args, result.softmax, store.end, &lse);
  const float4 out = {result.out.x * factor, result.out.y * factor, result.out.z * factor, result.out.w * factor};
  uint2 packed;
  if (args.params.dtype == DType::kBF16) {
    packed = {Pack<__nv_bfloat16>(out.x, out.y), Pack<__nv_bfloat16>(out.z, out.w)};
  } else {
    packed = {Pack<__half>(out.x, out.y), Pack<__half>(out.z, out.w)};
  }
  if (!write) return;
  *reinterpret_cast<uint2*>(store.out + column) = packed;
  if (store.lse != nullptr && column == 0) *store.lse = lse;
}

// The scratch: slots of slot_rows rows, each its output and then its softmax.
struct Scratch {
  // Of a row's output, counted in four floats. It is below 2^32: see MakeLayout.
  __device__ static uint32_t Place(const DecodeArgs& args, unsigned slot, int row) {
    return (slot * static_cast<unsigned>(args.slot_rows) + static_cast<unsigned>(row)) * args.slot_row;
  }
  __device__ static float* Out(const DecodeArgs& args, uint32_t place) {
    return reinterpret_cast<float*>(static_cast<float4*>(args.params.scratch) + place);
  }
  __device__ static Softmax* SoftmaxOf(const DecodeArgs& args, uint32_t place) {
    return reinterpret_cast<Softmax*>(static_cast<float4*>(args.params.scratch) + place + (args.slot_row - 1));
  }
};

// A unit's index for a kv head among all that the call may have: sequences' tokens are their own, and a token begins at
// most tiles_per_token row tiles.
__device__ inline unsigned UnitIndex(const DecodeArgs& args, int q_begin, const UnitPlace& place) {
  const unsigned tile = static_cast<unsigned>(q_begin) * args.tiles_per_token + place.row_tile;
  return tile * static_cast<unsigned>(args.params.num_kv_heads) + place.kv_head;
}

// The slot of a partial result that worker `worker` leaves behind of a unit: of the groups from the unit's beginning on
// that it has whole, merged (at_unit_begin); of group `group`'s chunks from its beginning on; or of chunk `chunk` of a
// group whose beginning another worker has. has_unit_begin, has_group_begin: the worker has the first chunk of the
// unit, of the group. It leaves at most one unit that it has begun, one group of it, and one unit whose beginning it
// lacks.
__device__ inline unsigned SlotOf(unsigned worker, bool at_unit_begin, bool has_unit_begin, bool has_group_begin,
                                  int group, int chunk) {
  const int index = has_unit_begin    ? kGroupChunks + kMaxGroups + (at_unit_begin ? 0 : 1)
                    : has_group_begin ? kGroupChunks + group
                                      : chunk;
  return worker * kWorkerSlots + index;
}
// As above where there are few units: of one chunk.
__device__ inline unsigned SlotOfFew(unsigned unit, int chunk) { return unit * kMaxChunks + chunk; }

// Of a partial result, past L1, which may have seen the place before it was written. Nothing is read, but the
// instructions are fetched, unless `read`.
__device__ inline Softmax LoadSoftmax(const Softmax* from, bool read) {
  Softmax softmax = {-INFINITY, 0.0f};
  asm volatile(
      "{\n"
      ".reg .pred read;\n"
      "setp.ne.u32 read, %3, 0;\n"
      "@read ld.global.cg.v2.f32 {%0, %1}, [%2];\n"
      "}"
      : "+f"(softmax.max), "+f"(softmax.sum)
      : "l"(from), "r"(static_cast<uint32_t>(read))
      : "memory");
  return softmax;
}
__device__ inline float4 LoadColumns(const float* from, bool read) {
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
  asm volatile(
      "{\n"
      ".reg .pred read;\n"
      "setp.ne.u32 read, %5, 0;\n"
      "@read ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(out.x), "+f"(out.y), "+f"(out.z), "+f"(out.w)
      : "l"(from), "r"(static_cast<uint32_t>(read))
      : "memory");
  return out;
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_ATTENTION_STATE_CUH_
