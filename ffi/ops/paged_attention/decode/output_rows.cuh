// From a row's accumulator to its output: where the row stands in `out` and `lse`, and how it is normalized.
#ifndef XLA_GPU_OPS_PAGED_ATTENTION_DECODE_OUTPUT_ROWS_CUH_
#define XLA_GPU_OPS_PAGED_ATTENTION_DECODE_OUTPUT_ROWS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ffi/device/mma.cuh"
#include "ffi/ops/paged_attention/decode/attention_state.cuh"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/padding_rows.cuh"

namespace xla_gpu::decode {

// What the rows of a query head are normalized with.
struct HeadEpilogue {
  float sink;     // in units of log2; -inf: none
  float v_scale;  // of the stored values

  __device__ static HeadEpilogue Of(const DecodeArgs& args, int head) {
    const PagedAttentionParams& params = args.params;
    HeadEpilogue epilogue = {-INFINITY, 1.0f};
    if (params.sinks != nullptr) epilogue.sink = __fmul_rn(__ldg(params.sinks + head), kLog2E);
    if (params.v_scale != nullptr) {
      epilogue.v_scale = __ldg(params.v_scale + (params.scale_per_head ? head / args.group_size : 0));
    }
    return epilogue;
  }
};

// The factor that turns a row's accumulator into its output. *lse receives the natural logarithm of the sum of
// exp(score), sink included, if that is wanted or the row has seen no key.
__device__ inline float FinalizeRow(const DecodeArgs& args, AttentionState state, const HeadEpilogue& epilogue,
                                    float* lse) {
  if (state.sum == 0.0f) {  // no key: a sink alone has no value
    *lse = -INFINITY;
    return 0.0f;
  }
  float factor = epilogue.v_scale;
  if (args.params.sinks != nullptr) factor = __fmul_rn(factor, state.Merge({epilogue.sink, 1.0f}).first);
  if (args.params.lse != nullptr) *lse = state.LogSumExp();
  return state.Normalize(factor);
}

// Where row `row` of a sequence and KV head stands. Its rows are (query, head of the GQA group) pairs, heads vary
// fastest.
struct RowIndex {
  int head;
  int64_t index;  // token * num_heads + head: in lse, and in out in units of head_dim

  __device__ static RowIndex Of(const DecodeArgs& args, int q_begin, int kv_head, int row) {
    const int query = args.QueryOf(row);
    const int head = kv_head * args.group_size + (row - query * args.group_size);
    return {head, (int64_t{q_begin} + query) * args.params.num_heads + head};
  }
};

// A row's destination, and what it is normalized with.
struct OutputRow {
  uint16_t* out;  // [head_dim], float16 or bfloat16
  float* lse;     // [1]; null: not wanted
  HeadEpilogue epilogue;

  __device__ static OutputRow Of(const DecodeArgs& args, const RowIndex& row) {
    const PagedAttentionParams& params = args.params;
    return {static_cast<uint16_t*>(params.out) + row.index * params.head_dim,
            params.lse == nullptr ? nullptr : params.lse + row.index, HeadEpilogue::Of(args, row.head)};
  }
};

// Normalizes and, if `write`, stores four columns of a row from `column` on, and its log-sum-exp with the first ones.
__device__ inline void StoreColumns(const DecodeArgs& args, const OutputRow& row, int column,
                                    const PartialState& result, bool write = true) {
  float lse;
  const float factor = FinalizeRow(args, result.state, row.epilogue, &lse);
  const float4 o = {result.o.x * factor, result.o.y * factor, result.o.z * factor, result.o.w * factor};
  uint2 packed;
  if (args.params.dtype == DType::kBF16) {
    packed = {Pack<__nv_bfloat16>(o.x, o.y), Pack<__nv_bfloat16>(o.z, o.w)};
  } else {
    packed = {Pack<__half>(o.x, o.y), Pack<__half>(o.z, o.w)};
  }
  if (!write) return;
  *reinterpret_cast<uint2*>(row.out + column) = packed;
  if (row.lse != nullptr && column == 0) *row.lse = lse;
}

// Writes what no work tile does: the padding rows, and NaN to sequences that are too long for a tree_mask. By one CTA.
template <typename T>
__device__ inline void FillOtherRows(const DecodeArgs& args) {
  FillPaddingRows<T>(args.params, 0, 1);
  if (args.tree_mask != nullptr) FillLongSequences<T>(args.params, args.max_tokens);
}
// The same for 16-bit dtypes.
__device__ inline void FillOtherRows16Bit(const DecodeArgs& args) {
  if (args.params.dtype == DType::kBF16) {
    FillOtherRows<__nv_bfloat16>(args);
  } else {
    FillOtherRows<__half>(args);
  }
}

}  // namespace xla_gpu::decode

#endif  // XLA_GPU_OPS_PAGED_ATTENTION_DECODE_OUTPUT_ROWS_CUH_
