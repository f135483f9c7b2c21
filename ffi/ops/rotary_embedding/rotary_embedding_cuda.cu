// rotary_embedding and rotary_and_cache on a GPU: limited by the bandwidth for the heads. A few lanes take a head of a
// token, 32 bytes of it each.
#include <algorithm>
#include <cstdint>

#include "ffi/base/cuda_status.h"
#include "ffi/device/cache_slots.cuh"
#include "ffi/device/dependent_launch.cuh"
#include "ffi/device/dispatch.cuh"
#include "ffi/device/fast_divisor.h"
#include "ffi/device/launch.cuh"
#include "ffi/device/vector.cuh"
#include "ffi/ops/rotary_embedding/head_units.cuh"
#include "ffi/ops/rotary_embedding/rotary_embedding.h"

namespace xla_gpu {
namespace {

constexpr int kRotaryThreads = 256;
constexpr int kRotaryCtas = 4;   // of an SM
constexpr int kRotaryAhead = 1;  // heads that a lane loads before it turns one
constexpr int64_t kWantedRotaryBlocks = 128 * kRotaryCtas;

template <typename T, int kVec>
__global__ void __launch_bounds__(kRotaryThreads)
    RotaryEmbeddingKernel(const __grid_constant__ RotaryEmbeddingParams p, const HeadUnits h) {
  const int64_t heads = p.num_heads + p.num_kv_heads;
  const int64_t rows = p.num_tokens * heads;
  const int groups = kRotaryThreads >> h.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & ((1 << h.lane_bits) - 1);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * groups + (threadIdx.x >> h.lane_bits); row < rows;
       row += static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t token = row / heads;
    const int64_t head = row - token * heads;
    const bool is_query = head < p.num_heads;
    const int64_t at =
        (is_query ? token * p.num_heads + head : token * p.num_kv_heads + head - p.num_heads) * p.head_dim;
    const T* const from = static_cast<const T*>(is_query ? p.query : p.key) + at;
    T* const to = static_cast<T*>(is_query ? p.query_out : p.key_out) + at;
    for (int unit = lane; unit < h.units; unit += 1 << h.lane_bits) {
      HeadUnit<T, kVec> values;
      UnitTurns<kVec> angle;
      values.Load(from, h, unit);
      angle.Load(p.rotation, p.rotation.positions[token], h, unit);
      TurnUnit(angle, h, unit, &values);
      values.Store(to, h, unit);
    }
  }
}

// K or V of one head in the cache.
struct CacheRow {
  void* cache;
  int64_t at;  // element
  DType dtype;
  float scale;

  template <typename T, int kVec>
  __device__ __forceinline__ void Store(const HeadUnit<T, kVec>& values, const HeadUnits& h, int unit) const {
    if (!IsFloat8(dtype)) {
      values.Store(static_cast<T*>(cache) + at, h, unit);
      return;
    }
    HeadUnit<uint8_t, kVec> stored;
    const auto convert = [&](__nv_fp8_interpretation_t format) {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        stored.first.values[j] = ToFloat8(values.first.values[j], scale, format);
        stored.second.values[j] = ToFloat8(values.second.values[j], scale, format);
      }
    };
    if (dtype == DType::kF8E4M3FN) {
      convert(__NV_E4M3);
    } else {
      convert(__NV_E5M2);
    }
    stored.Store(static_cast<uint8_t*>(cache) + at, h, unit);
  }
};

// A CTA takes `tokens_per_block` tokens, and of those `heads_per_block` heads; all of them where it takes more than one
// token. kVec > 1: a lane holds at most one unit. The norms of heads add in the order that `summed` says, which depends
// on sizes alone and not on what is aligned.
template <typename T, int kVec>
__global__ void __launch_bounds__(kRotaryThreads, kRotaryCtas)
    RotaryAndCacheKernel(const __grid_constant__ RotaryAndCacheParams p, const HeadUnits h, const HeadUnits summed,
                         int tokens_per_block, int heads_per_block, FastDivisor by_heads) {
  using Unit = HeadUnit<T, kVec>;
  __shared__ LatestTokens latest;
  __shared__ int64_t destinations[kMaxTokensPerBlock];  // element offset of the token's slot; -1: nothing to store
  __shared__ int32_t positions[kMaxTokensPerBlock];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int count = static_cast<int>(min(static_cast<int64_t>(tokens_per_block), p.num_tokens - first));
  const int with_slot = static_cast<int>(max(min(static_cast<int64_t>(count), p.num_slots - first), int64_t{0}));
  const auto slot_of = [&](int64_t token) {
    return p.slots_are_64_bit ? static_cast<const int64_t*>(p.slot_mapping)[token]
                              : static_cast<int64_t>(static_cast<const int32_t*>(p.slot_mapping)[token]);
  };
  const CacheSlots slots = {p.num_slots, p.num_pages * p.page_size, p.page_size, p.page_stride, p.slot_stride};
  const int num_heads = static_cast<int>(p.num_heads), num_kv_heads = static_cast<int>(p.num_kv_heads);
  const int heads = num_heads + 2 * num_kv_heads;
  const int first_head = static_cast<int>(blockIdx.y) * heads_per_block;
  const int lanes = 1 << h.lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  // A decode step's tokens have a CTA or more each, and wait for one load after the other.
  const bool single = tokens_per_block == 1;
  int64_t single_destination = -1, single_position = 0;
  if (single) {
    single_position = p.rotation.positions[first];
    PrefetchTurns(p.rotation, single_position);
    if (first_head + heads_per_block > num_heads) {  // else the CTA has queries alone
      single_destination = FindDestination<kRotaryThreads>(slot_of, first, slots);
    }
  } else {
    for (int i = threadIdx.x; i < count; i += kRotaryThreads) positions[i] = p.rotation.positions[first + i];
    FindDestinations<kRotaryThreads>(slot_of, first, with_slot, slots, &latest, destinations);
  }
  // What stands above has read slots, positions and the table, operands of every call with this kernel.
  AllowDependentLaunch();
  WaitForPreviousKernel();

  const int items = single ? min(heads_per_block, heads - first_head) : count * heads;
  const int step = kRotaryThreads >> h.lane_bits;
  const T* const qkv = static_cast<const T*>(p.qkv) + (first * heads + first_head) * p.head_dim;
  // The lane's unit of the next items, which are loaded while this one is turned and stored.
  [[maybe_unused]] uint4 next[kRotaryAhead][2] = {};
  const auto fetch = [&](int item, uint4* unit) {
    if (kVec == 1 || item >= items || lane >= h.units) return;
    const T* const from = qkv + static_cast<int64_t>(item) * p.head_dim;
    unit[0] = *reinterpret_cast<const uint4*>(from + h.First(lane));
    unit[1] = *reinterpret_cast<const uint4*>(from + h.Second(lane));
  };
  int item = static_cast<int>(threadIdx.x) >> h.lane_bits;
#pragma unroll
  for (int ahead = 0; ahead < kRotaryAhead; ++ahead) fetch(item + ahead * step, next[ahead]);
  for (; item < items; item += step) {
    Unit values = {};
    if constexpr (kVec > 1) {
      KeepWhole(&next[0][0]);
      KeepWhole(&next[0][1]);
      values.first = *reinterpret_cast<const typename Unit::V*>(&next[0][0]);
      values.second = *reinterpret_cast<const typename Unit::V*>(&next[0][1]);
#pragma unroll
      for (int ahead = 1; ahead < kRotaryAhead; ++ahead) {
        next[ahead - 1][0] = next[ahead][0];
        next[ahead - 1][1] = next[ahead][1];
      }
      fetch(item + kRotaryAhead * step, next[kRotaryAhead - 1]);
    }
    const int index = single ? 0 : static_cast<int>(by_heads.Divide(item));
    const int head = first_head + item - index * heads;
    const int64_t token = first + index;
    const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
    const int64_t destination = single ? single_destination : index < with_slot ? destinations[index] : -1;
    if (!is_query && destination < 0) continue;
    const T* const from = qkv + static_cast<int64_t>(item) * p.head_dim;
    const T* const bias = static_cast<const T*>(p.bias) + static_cast<int64_t>(head) * p.head_dim;
    const auto add_bias = [&](int unit) {
      if (p.bias == nullptr) return;
      Unit added;
      added.Load(bias, h, unit);
      values.Add(added);
    };
    if (kVec > 1 && lane < h.units) add_bias(lane);
    // ---- norm
    const T* const weight = is_value ? nullptr : static_cast<const T*>(is_query ? p.q_norm_weight : p.k_norm_weight);
    float scale = 0.0f;
    if (weight != nullptr) {
      float squares = 0.0f;
      if constexpr (kVec > 1) {
        values.AddSquares(&squares);
      } else {
        const auto element = [&](int i) {
          if (i >= h.head_dim) return 0.0f;
          const float value = static_cast<float>(from[i]);
          return p.bias == nullptr ? value : static_cast<float>(static_cast<T>(value + static_cast<float>(bias[i])));
        };
        for (int unit = lane; unit < summed.units; unit += lanes) {
          for (int j = 0; j < summed.vec; ++j) {
            const float a = element(summed.First(unit) + j), b = element(summed.Second(unit) + j);
            squares += a * a + b * b;
          }
        }
      }
      // The warp's other heads may have ended.
      const unsigned mask = (~0u >> (32 - lanes)) << (threadIdx.x % 32 - lane);
      for (int offset = lanes / 2; offset > 0; offset /= 2) squares += __shfl_xor_sync(mask, squares, offset);
      scale = RmsNormScale(squares, p.head_dim, p.norm_eps);
    }
    // ---- where the head goes
    const int kv_head = is_query ? 0 : head - num_heads - (is_value ? num_kv_heads : 0);
    const float* const scales = is_value ? p.v_scale : p.k_scale;
    const CacheRow row = {is_value ? p.v_cache : p.k_cache, destination + kv_head * p.head_stride, p.cache_dtype,
                          is_query || scales == nullptr ? 1.0f : scales[p.scale_per_head ? kv_head : 0]};
    T* const query = static_cast<T*>(p.query_out) + (token * num_heads + head) * p.head_dim;
    for (int unit = lane; unit < h.units; unit += lanes) {
      if constexpr (kVec == 1) {
        values.Load(from, h, unit);
        add_bias(unit);
      }
      if (weight != nullptr) {
        Unit factor;
        factor.Load(weight, h, unit);
        values.Norm(scale, factor, {p.weight_offset, p.round_once});
      }
      if (!is_value) {
        UnitTurns<kVec> angle;
        angle.Load(p.rotation, single ? single_position : positions[index], h, unit);
        TurnUnit(angle, h, unit, &values);
      }
      if (is_query) {
        values.Store(query, h, unit);
      } else {
        row.Store(values, h, unit);
      }
      if constexpr (kVec > 1) break;
    }
  }
}

// Whether each of the addresses and strides, in bytes, is a multiple of 16.
template <typename... Addresses>
bool AreMultiplesOf16(Addresses... addresses) {
  return ((... | reinterpret_cast<uintptr_t>(addresses)) % 16) == 0;
}

template <typename T, int kVec>
Status EmbedVectors(const RotaryEmbeddingParams& p, Stream stream) {
  const HeadUnits h = HeadUnits::Make(p.rotation, p.head_dim, kVec);
  const int64_t rows = p.num_tokens * (p.num_heads + p.num_kv_heads);
  const int64_t groups = kRotaryThreads >> h.lane_bits;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((rows + groups - 1) / groups, 1 << 16));
  RotaryEmbeddingKernel<T, kVec><<<blocks, kRotaryThreads, /*shared_mem=*/0, stream>>>(p, h);
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

template <typename T>
Status Embed(const RotaryEmbeddingParams& p, Stream stream) {
  if (p.head_dim >= int64_t{1} << 31) {
    return Status::InvalidArgument("rotary_embedding: query: expected fewer than 2^31 elements in a head");
  }
  const bool vectors = HeadUnits::Fits(p.rotation, p.head_dim, kRotaryVector<T>) &&
                       AreMultiplesOf16(p.query, p.key, p.query_out, p.key_out, p.rotation.table);
  return vectors ? EmbedVectors<T, kRotaryVector<T>>(p, stream) : EmbedVectors<T, 1>(p, stream);
}

template <typename T, int kVec>
Status StoreVectors(const RotaryAndCacheParams& p, Stream stream, LaunchOrder order) {
  const HeadUnits h = HeadUnits::Make(p.rotation, p.head_dim, kVec);
  const bool fits = HeadUnits::Fits(p.rotation, p.head_dim, kRotaryVector<T>);
  const HeadUnits summed = HeadUnits::Make(p.rotation, p.head_dim, fits ? kRotaryVector<T> : 1);
  const int64_t heads = p.num_heads + 2 * p.num_kv_heads;
  const int64_t tokens =
      std::min<int64_t>((p.num_tokens + kWantedRotaryBlocks - 1) / kWantedRotaryBlocks, kMaxTokensPerBlock);
  const int64_t blocks = (p.num_tokens + tokens - 1) / tokens;
  if (heads >= int64_t{1} << 23 || blocks >= int64_t{1} << 31) {
    return Status::InvalidArgument("rotary_and_cache: qkv: expected fewer than 2^23 heads and 2^38 tokens");
  }
  // Few tokens: their heads over several CTAs.
  const int64_t heads_at_once = kRotaryThreads >> h.lane_bits;
  const int64_t wanted = tokens > 1 ? 1 : std::max<int64_t>(kWantedRotaryBlocks / blocks, 1);
  const int64_t heads_per_block =
      std::max(tokens > 1 ? heads : heads_at_once, (heads + std::min<int64_t>(wanted, 65535) - 1) / wanted);
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>((heads + heads_per_block - 1) / heads_per_block));
  return LaunchKernel(RotaryAndCacheKernel<T, kVec>, grid, dim3(kRotaryThreads), /*shared_bytes=*/0, stream, order, p,
                      h, summed, static_cast<int>(tokens), static_cast<int>(heads_per_block), FastDivisor::Make(heads));
}

template <typename T>
Status Store(const RotaryAndCacheParams& p, Stream stream, LaunchOrder order) {
  // A vector of a float8 cache has half the bytes, or a quarter; that its address is a multiple of 16 costs nothing.
  const auto strides = static_cast<uintptr_t>((p.page_stride | p.slot_stride | p.head_stride) *
                                              static_cast<int64_t>(SizeOf(p.cache_dtype)));
  const bool vectors = HeadUnits::Fits(p.rotation, p.head_dim, kRotaryVector<T>) &&
                       AreMultiplesOf16(p.qkv, p.bias, p.q_norm_weight, p.k_norm_weight, p.query_out, p.k_cache,
                                        p.v_cache, p.rotation.table, strides);
  return vectors ? StoreVectors<T, kRotaryVector<T>>(p, stream, order) : StoreVectors<T, 1>(p, stream, order);
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
  if (params.num_tokens == 0 || params.head_dim == 0 || params.num_heads + params.num_kv_heads == 0)
    return Status::Ok();
  return DispatchFloat(params.dtype, "rotary_and_cache: qkv",
                       [&](auto zero) { return Store<decltype(zero)>(params, stream, order); });
}

}  // namespace xla_gpu
