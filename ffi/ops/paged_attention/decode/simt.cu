// The decode path on the CUDA cores: for float32 queries, since TF32 keeps only 10 bits of an operand, and for those
// with a tree_mask that no kernel with wide work tiles takes. One CTA for each sequence and query head. Each warp takes
// every kWarps32-th key tile. The warps' states are merged in order, so that a row's bits depend on its sequence alone.
#include <cuda_runtime.h>

#include <algorithm>

#include "ffi/base/cuda_status.h"
#include "ffi/device/attention_state.cuh"
#include "ffi/device/float8.cuh"
#include "ffi/ops/paged_attention/decode/formats.h"
#include "ffi/ops/paged_attention/decode/output_rows.cuh"
#include "ffi/ops/paged_attention/decode/params.h"
#include "ffi/ops/paged_attention/padding_rows.cuh"
#include "ffi/ops/paged_attention/sequence_metadata.cuh"

namespace xla_gpu::decode {
namespace {

constexpr int kWarps32 = 8;
constexpr int kTileKeys = 8;                                   // keys whose loads are in flight together
constexpr int kVectors = static_cast<int>(kMaxHeadDim) / 128;  // float4 of a row per lane

__device__ inline float Dot(const float4& a, const float4& b) {
  return __fmaf_rn(a.x, b.x, __fmaf_rn(a.y, b.y, __fmaf_rn(a.z, b.z, a.w * b.w)));
}

__device__ inline float4 Scaled(const float4& a, float f) { return {a.x * f, a.y * f, a.z * f, a.w * f}; }

__device__ inline void AddScaled(float4& sum, const float4& a, float f) {
  sum = {__fmaf_rn(a.x, f, sum.x), __fmaf_rn(a.y, f, sum.y), __fmaf_rn(a.z, f, sum.z), __fmaf_rn(a.w, f, sum.w)};
}

// Four neighbouring elements of a 16-bit dtype.
template <typename T>
__device__ inline float4 Load4(const void* at) {
  const uint2 words = __ldg(static_cast<const uint2*>(at));
  const float2 low = Unpack<T>(words.x), high = Unpack<T>(words.y);
  return {low.x, low.y, high.x, high.y};
}

// The query and the result, by their dtype.
struct QueryF32 {
  __device__ static float4 Load(const void* query, int64_t element, DType /*dtype*/) {
    return *reinterpret_cast<const float4*>(static_cast<const float*>(query) + element);
  }
  __device__ static void Store(void* out, int64_t element, const float4& four, DType /*dtype*/) {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + element) = four;
  }
  __device__ static void FillOther(const DecodeArgs& args) { FillOtherRows<float>(args); }
};
struct Query16Bit {
  __device__ static float4 Load(const void* query, int64_t element, DType dtype) {
    const uint16_t* const at = static_cast<const uint16_t*>(query) + element;
    return dtype == DType::kBF16 ? Load4<__nv_bfloat16>(at) : Load4<__half>(at);
  }
  __device__ static void Store(void* out, int64_t element, const float4& four, DType dtype) {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(out) + element) =
        dtype == DType::kBF16 ? uint2{Pack<__nv_bfloat16>(four.x, four.y), Pack<__nv_bfloat16>(four.z, four.w)}
                              : uint2{Pack<__half>(four.x, four.y), Pack<__half>(four.z, four.w)};
  }
  __device__ static void FillOther(const DecodeArgs& args) { FillOtherRows16Bit(args); }
};

// Loads four neighbouring elements of the cache, by its dtype.
struct CacheF32 {
  using Stored = float;
  __device__ static float4 Load(const float* at) { return __ldg(reinterpret_cast<const float4*>(at)); }
};
template <typename T>
struct Cache16Bit {
  using Stored = uint16_t;
  __device__ static float4 Load(const uint16_t* at) { return Load4<T>(at); }
};

template <bool kE4M3>
struct CacheFloat8 {
  using Stored = uint8_t;
  __device__ static float4 Load(const uint8_t* at) {
    return Float8ToFloat4<kE4M3>(__ldg(reinterpret_cast<const uint32_t*>(at)));
  }
};

// A sequence and query head, by a CTA.
template <class Query, class Cache>
__device__ void ComputeSequence(const DecodeArgs& args, int seq, int head, bool in_order) {
  using Stored = typename Cache::Stored;
  __shared__ float4 outs[kWarps32][kVectors * 32];
  __shared__ AttentionState states[kWarps32];
  const PagedAttentionParams& params = args.params;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const SequenceInfo sequence = LoadSequence(params, seq, in_order);
  if (sequence.q_len < 1 || sequence.q_len > args.max_tokens) return;

  // ---- The KV head, and whether the sequence's metadata is valid
  const int64_t head_offset = head / args.group_size * params.head_stride;
  const Stored* const k_head = static_cast<const Stored*>(params.k_cache) + head_offset;
  const Stored* const v_head = static_cast<const Stored*>(params.v_cache) + head_offset;
  float scale = params.scale;
  if (params.k_scale != nullptr) scale *= __ldg(params.k_scale + (params.scale_per_head ? head / args.group_size : 0));
  // A page outside the cache makes all rows of the sequence NaN, rows that see no key included.
  bool bad = !sequence.valid;
  if (sequence.context_len > 0) {
    const int64_t hidden = int64_t{sequence.context_len} - sequence.q_len - args.window;
    const int first = args.window > 0 && hidden >= 0 ? args.PageOf(static_cast<int>(hidden) + 1) : 0;
    const int last = args.PageOf(sequence.context_len - 1);
    for (int index = first + static_cast<int>(threadIdx.x); index <= last; index += blockDim.x) {
      const int page = __ldg(params.block_tables + seq * params.pages_per_seq + index);
      bad = bad || page < 0 || page >= params.num_pages;
    }
  }
  bad = __syncthreads_or(bad);
  for (int query = 0; query < sequence.q_len; ++query) {
    // ---- The query row, and the keys (hidden, last] that it sees, of new tokens those in `tokens`
    const int64_t row = (int64_t{sequence.q_begin} + query) * params.num_heads + head;
    const int position = sequence.context_len - sequence.q_len + query;
    const int64_t hidden = params.sliding_window > 0 ? int64_t{position} - params.sliding_window : int64_t{-1};
    const bool tree = args.tree_mask != nullptr;
    const int last = tree ? sequence.context_len - 1 : position;
    const uint64_t tokens = tree ? args.TreeTokens(sequence.q_begin + query) : ~uint64_t{0};
    const int begin = hidden >= 0 ? static_cast<int>(hidden + 1) / kTileKeys : 0;
    float4 q[kVectors], out[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = i * 128 + lane * 4;
      q[i] = out[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (column < params.head_dim) {
        q[i] = Query::Load(params.query, row * params.head_dim + column, params.dtype);
      }
    }
    // ---- Each warp's key tiles
    AttentionState state = {-INFINITY, 0.0f};
    for (int tile = begin + warp; tile * kTileKeys <= last; tile += kWarps32) {
      // Lane i looks up the cache slot of key i.
      const int my_key = tile * kTileKeys + lane;
      const int token = my_key - (sequence.context_len - sequence.q_len);
      const bool in_tree = !tree || token < 0 || (tokens >> (token & 63) & 1) != 0;
      const bool seen = lane < kTileKeys && my_key <= last && my_key > hidden && in_tree;
      int64_t my_offset = -1;
      if (seen) {
        const int index = args.PageOf(my_key);
        const int64_t page = __ldg(params.block_tables + seq * params.pages_per_seq + index);
        const bool in_cache = page >= 0 && page < params.num_pages;
        bad = bad || !in_cache;
        if (in_cache) my_offset = page * params.page_stride + (my_key - index * params.page_size) * params.slot_stride;
      }
      // The loads of all keys are in flight together.
      float4 k[kTileKeys][kVectors], v[kTileKeys][kVectors];
      float score[kTileKeys];
#pragma unroll
      for (int key = 0; key < kTileKeys; ++key) {
        const int64_t offset = __shfl_sync(0xffffffffu, my_offset, key);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          const int column = i * 128 + lane * 4;
          k[key][i] = v[key][i] = {0.0f, 0.0f, 0.0f, 0.0f};
          if (offset >= 0 && column < params.head_dim) {
            k[key][i] = Cache::Load(k_head + offset + column);
            v[key][i] = Cache::Load(v_head + offset + column);
          }
        }
        score[key] = offset >= 0 ? 0.0f : -INFINITY;
      }
      // Scores, in units of log2. A score of -inf: the key is hidden.
      float largest = state.max;
#pragma unroll
      for (int key = 0; key < kTileKeys; ++key) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) sum += Dot(q[i], k[key][i]);
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        sum *= scale;
        if (params.soft_cap != 0.0f) sum = params.soft_cap * tanhf(sum / params.soft_cap);
        if (score[key] == 0.0f) score[key] = sum * kLog2E;
        largest = fmaxf(largest, score[key]);
      }
      // Online softmax, and the product with V.
      const float shift = largest == -INFINITY ? 0.0f : largest;
      const float correction = exp2f(state.max - shift);
      state.max = largest;
      state.sum *= correction;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) out[i] = Scaled(out[i], correction);
#pragma unroll
      for (int key = 0; key < kTileKeys; ++key) {
        const float p = exp2f(score[key] - shift);
        state.sum += p;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) AddScaled(out[i], v[key][i], p);
      }
    }
    if (__any_sync(0xffffffffu, bad)) state.sum = NAN;

    // ---- The merge of the warps' states, in order, and the output
#pragma unroll
    for (int i = 0; i < kVectors; ++i) outs[warp][i * 32 + lane] = out[i];
    if (lane == 0) states[warp] = state;
    __syncthreads();
    AttentionState total = states[0];
    MergeWeights weights[kWarps32];
#pragma unroll
    for (int i = 1; i < kWarps32; ++i) weights[i] = total.Merge(states[i]);
    float lse;
    const float factor = FinalizeRow(args, total, HeadEpilogue::Of(args, head), &lse);
    for (int column = 4 * threadIdx.x; column < params.head_dim; column += 4 * blockDim.x) {
      float4 sum = outs[0][column / 4];
#pragma unroll
      for (int i = 1; i < kWarps32; ++i) {
        sum = Scaled(sum, weights[i].first);
        AddScaled(sum, outs[i][column / 4], weights[i].second);
      }
      Query::Store(params.out, row * params.head_dim + column, Scaled(sum, factor), params.dtype);
    }
    if (params.lse != nullptr && threadIdx.x == 0) params.lse[row] = lse;
    __syncthreads();
  }
}

template <class Query, class Cache>
__global__ void __launch_bounds__(kWarps32 * 32) DecodeSimtKernel(const __grid_constant__ DecodeArgs args) {
  const PagedAttentionParams& params = args.params;
  const int live = LiveSequences(params);
  const bool in_order = QueryStartsInOrder(params, live);
  if (args.fill_padding_rows && blockIdx.x == 0 && blockIdx.y == 0) Query::FillOther(args);
  for (int seq = static_cast<int>(blockIdx.x); seq < live; seq += static_cast<int>(gridDim.x)) {
    ComputeSequence<Query, Cache>(args, seq, static_cast<int>(blockIdx.y), in_order);
  }
}

void (*SelectKernel(const PagedAttentionParams& params))(DecodeArgs) {
  const bool f32 = params.dtype == DType::kF32;
  switch (params.cache_dtype) {
    case DType::kF8E4M3FN:
      return f32 ? DecodeSimtKernel<QueryF32, CacheFloat8<true>> : DecodeSimtKernel<Query16Bit, CacheFloat8<true>>;
    case DType::kF8E5M2:
      return f32 ? DecodeSimtKernel<QueryF32, CacheFloat8<false>> : DecodeSimtKernel<Query16Bit, CacheFloat8<false>>;
    case DType::kF16:
      return DecodeSimtKernel<Query16Bit, Cache16Bit<__half>>;
    case DType::kBF16:
      return DecodeSimtKernel<Query16Bit, Cache16Bit<__nv_bfloat16>>;
    default:
      return DecodeSimtKernel<QueryF32, CacheF32>;
  }
}

}  // namespace

Status LaunchSimt(const PagedAttentionCall& params, Stream stream) {
  const DecodeArgs args = MakeArgs(params, MakeKernelConfig(params));
  constexpr int64_t kManyCtas = 8192;
  const int64_t sequences = params.max_seqs <= kManySequences
                                ? params.max_seqs
                                : std::min(params.max_seqs, std::max(kManySequences / 4, kManyCtas / params.num_heads));
  const dim3 grid(static_cast<unsigned>(std::max<int64_t>(sequences, 1)), static_cast<unsigned>(params.num_heads));
  SelectKernel(params)<<<grid, kWarps32 * 32, 0, stream>>>(args);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace xla_gpu::decode
