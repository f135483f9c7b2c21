// rotary_embedding and rotary_and_cache on a GPU: limited by the bandwidth for the heads. A warp takes a head of a
// token.
#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/cache_slots.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/dispatch.cuh"
#include "ffi/device/launch.cuh"
#include "ffi/device/rms_norm.cuh"
#include "ffi/ops/rotary_embedding/rotary_embedding.h"

namespace xla_gpu {
namespace {

constexpr int kRotaryThreads = 256;
constexpr int kRotaryWarps = kRotaryThreads / 32;
constexpr int64_t kWantedRotaryBlocks = 512;

// Turns a head of a token at `position`: load(i) and store(i, value) see its elements, each of them in one lane.
template <typename T, typename Load, typename Store>
__device__ __forceinline__ void RotateHead(const Rotation& rotation, int64_t position, int64_t head_dim,
                                           const Load& load, const Store& store) {
  const int lane = threadIdx.x % 32;
  const bool in_table = position >= 0 && position < rotation.max_positions;
  const float2* const turns =
      reinterpret_cast<const float2*>(rotation.table) + (in_table ? position : 0) * rotation.half;
  // All loads of two turns before their stores, which might write what the loads read as far as the compiler knows.
  constexpr int kTogether = 2;
  for (int64_t start = lane; start < rotation.half; start += kTogether * 32) {
    float a[kTogether], b[kTogether];
    float2 turn[kTogether];
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int64_t i = start + t * 32;
      if (i >= rotation.half) continue;
      const float nan = __int_as_float(0x7fc00000);
      turn[t] = in_table ? turns[i] : make_float2(nan, nan);
      a[t] = static_cast<float>(load(rotation.interleaved ? 2 * i : i));
      b[t] = static_cast<float>(load(rotation.interleaved ? 2 * i + 1 : i + rotation.half));
    }
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      const int64_t i = start + t * 32;
      if (i >= rotation.half) continue;
      // Not fused: in float32 these are the bits of models that round between product and sum.
      store(rotation.interleaved ? 2 * i : i,
            static_cast<T>(__fsub_rn(__fmul_rn(a[t], turn[t].x), __fmul_rn(b[t], turn[t].y))));
      store(rotation.interleaved ? 2 * i + 1 : i + rotation.half,
            static_cast<T>(__fadd_rn(__fmul_rn(b[t], turn[t].x), __fmul_rn(a[t], turn[t].y))));
    }
  }
  for (int64_t i = 2 * rotation.half + lane; i < head_dim; i += 32) {
    store(i, in_table ? load(i) : static_cast<T>(__int_as_float(0x7fc00000)));
  }
}

template <typename T>
__global__ void __launch_bounds__(kRotaryThreads)
    RotaryEmbeddingKernel(const __grid_constant__ RotaryEmbeddingParams p) {
  const int64_t heads = p.num_heads + p.num_kv_heads;
  const int64_t rows = p.num_tokens * heads;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRotaryWarps + threadIdx.x / 32; row < rows;
       row += static_cast<int64_t>(gridDim.x) * kRotaryWarps) {
    const int64_t token = row / heads;
    const int64_t head = row - token * heads;
    const bool is_query = head < p.num_heads;
    const int64_t at =
        (is_query ? token * p.num_heads + head : token * p.num_kv_heads + head - p.num_heads) * p.head_dim;
    const T* const from = static_cast<const T*>(is_query ? p.query : p.key) + at;
    T* const to = static_cast<T*>(is_query ? p.query_out : p.key_out) + at;
    RotateHead<T>(
        p.rotation, p.rotation.positions[token], p.head_dim, [&](int64_t i) { return from[i]; },
        [&](int64_t i, T value) { to[i] = value; });
  }
}

// Elements of K or V of one head in the cache.
template <typename T>
struct CacheRow {
  void* cache;
  int64_t at;  // element
  DType dtype;
  float scale;

  __device__ __forceinline__ void Store(int64_t i, T value) const {
    if (dtype == DType::kF8E4M3FN) {
      static_cast<uint8_t*>(cache)[at + i] = ToFloat8(value, scale, __NV_E4M3);
    } else if (dtype == DType::kF8E5M2) {
      static_cast<uint8_t*>(cache)[at + i] = ToFloat8(value, scale, __NV_E5M2);
    } else {
      static_cast<T*>(cache)[at + i] = value;
    }
  }
};

// A CTA takes `tokens_per_block` tokens, and of those every gridDim.y-th head.
template <typename T>
__global__ void __launch_bounds__(kRotaryThreads)
    RotaryAndCacheKernel(const __grid_constant__ RotaryAndCacheParams p, int tokens_per_block) {
  __shared__ LatestTokens latest;
  __shared__ int64_t destinations[kMaxTokensPerBlock];  // element offset of the token's slot; -1: nothing to store
  const int lane = threadIdx.x % 32;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int count = static_cast<int>(min(static_cast<int64_t>(tokens_per_block), p.num_tokens - first));
  const int with_slot = static_cast<int>(max(min(static_cast<int64_t>(count), p.num_slots - first), int64_t{0}));
  const auto slot_of = [&](int64_t token) {
    return p.slots_are_64_bit ? static_cast<const int64_t*>(p.slot_mapping)[token]
                              : static_cast<int64_t>(static_cast<const int32_t*>(p.slot_mapping)[token]);
  };
  const CacheSlots slots = {p.num_slots, p.num_pages * p.page_size, p.page_size, p.page_stride, p.slot_stride};
  // A decode step's tokens have a CTA or more each, and wait for one load after the other.
  const bool single = tokens_per_block == 1;
  int64_t single_destination = -1, single_position = 0;
  if (single) {
    single_position = p.rotation.positions[first];
    single_destination = FindDestination<kRotaryThreads>(slot_of, first, slots);
  } else {
    FindDestinations<kRotaryThreads>(slot_of, first, with_slot, slots, &latest, destinations);
  }
  // What stands above has read slots and positions, operands of every call with this kernel.
  AllowDependentLaunch();
  WaitForPreviousKernel();

  const int heads = static_cast<int>(p.num_heads + 2 * p.num_kv_heads);
  const int group = static_cast<int>(gridDim.y);
  const int heads_here = (heads - static_cast<int>(blockIdx.y) + group - 1) / group;
  for (int item = threadIdx.x / 32; item < count * heads_here; item += kRotaryWarps) {
    const int index = single ? 0 : item / heads_here;
    const int head = (item - index * heads_here) * group + static_cast<int>(blockIdx.y);
    const int64_t token = first + index;
    const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
    const int64_t destination = single ? single_destination : index < with_slot ? destinations[index] : -1;
    const int64_t position = single ? single_position : p.rotation.positions[token];
    if (!is_query && destination < 0) continue;
    const T* const from = static_cast<const T*>(p.qkv) + (token * heads + head) * p.head_dim;
    const T* const bias = static_cast<const T*>(p.bias) + static_cast<int64_t>(head) * p.head_dim;
    const auto load = [&](int64_t i) {
      return p.bias == nullptr ? from[i] : static_cast<T>(static_cast<float>(from[i]) + static_cast<float>(bias[i]));
    };
    // ---- where the head goes
    const int kv_head = is_query ? 0 : (head - static_cast<int>(p.num_heads)) % static_cast<int>(p.num_kv_heads);
    const float* const scales = is_value ? p.v_scale : p.k_scale;
    const CacheRow<T> row = {is_value ? p.v_cache : p.k_cache, destination + kv_head * p.head_stride, p.cache_dtype,
                             scales == nullptr ? 1.0f : scales[p.scale_per_head ? kv_head : 0]};
    T* const query = static_cast<T*>(p.query_out) + (token * p.num_heads + head) * p.head_dim;
    const auto store = [&](int64_t i, T value) {
      if (is_query) {
        query[i] = value;
      } else {
        row.Store(i, value);
      }
    };
    if (is_value) {
      for (int64_t i = lane; i < p.head_dim; i += 32) store(i, load(i));
      continue;
    }
    const T* const weight = static_cast<const T*>(is_query ? p.q_norm_weight : p.k_norm_weight);
    if (weight == nullptr) {
      RotateHead<T>(p.rotation, position, p.head_dim, load, store);
      continue;
    }
    float squares = 0.0f;
    for (int64_t i = lane; i < p.head_dim; i += 32) {
      const float value = static_cast<float>(load(i));
      squares += value * value;
    }
    const float scale = RmsNormScale(WarpSum(squares), p.head_dim, p.norm_eps);
    const RmsNormWeight how = {p.weight_offset, p.round_once};
    RotateHead<T>(
        p.rotation, position, p.head_dim, [&](int64_t i) { return RmsNormElement(load(i), scale, weight[i], how); },
        store);
  }
}

template <typename T>
Status Embed(const RotaryEmbeddingParams& p, Stream stream) {
  const int64_t rows = p.num_tokens * (p.num_heads + p.num_kv_heads);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((rows + kRotaryWarps - 1) / kRotaryWarps, 1 << 16));
  RotaryEmbeddingKernel<T><<<blocks, kRotaryThreads, /*shared_mem=*/0, stream>>>(p);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

template <typename T>
Status Store(const RotaryAndCacheParams& p, Stream stream, LaunchOrder order) {
  const int64_t heads = p.num_heads + 2 * p.num_kv_heads;
  int64_t tokens =
      std::min<int64_t>((p.num_tokens + kWantedRotaryBlocks - 1) / kWantedRotaryBlocks, kMaxTokensPerBlock);
  const int64_t blocks = (p.num_tokens + tokens - 1) / tokens;
  if (heads >= int64_t{1} << 23 || blocks >= int64_t{1} << 31) {
    return Status::InvalidArgument("rotary_and_cache: qkv: expected fewer than 2^23 heads and 2^38 tokens");
  }
  // Few tokens: their heads over several CTAs.
  const int64_t groups =
      std::clamp<int64_t>(kWantedRotaryBlocks / blocks, 1, (heads + kRotaryWarps - 1) / kRotaryWarps);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(std::min<int64_t>(groups, 65535)));
  return LaunchKernel(RotaryAndCacheKernel<T>, grid, dim3(kRotaryThreads), /*shared_bytes=*/0, stream, order, p,
                      static_cast<int>(tokens));
}

}  // namespace

Status LaunchRotaryEmbedding(const RotaryEmbeddingParams& params, Stream stream) {
  if (params.num_tokens == 0 || params.head_dim == 0 || params.num_heads + params.num_kv_heads == 0) {
    return Status::Ok();
  }
  return DispatchFloat(params.dtype, "rotary_embedding: query",
                       [&](auto zero) { return Embed<decltype(zero)>(params, stream); });
}

Status LaunchRotaryAndCache(const RotaryAndCacheParams& params, Stream stream, LaunchOrder order) {
  if (params.num_tokens == 0 || params.head_dim == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "rotary_and_cache: qkv",
                       [&](auto zero) { return Store<decltype(zero)>(params, stream, order); });
}

}  // namespace xla_gpu
