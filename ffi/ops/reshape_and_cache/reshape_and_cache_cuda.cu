// reshape_and_cache on a GPU, in one launch: a block takes a few consecutive tokens, finds out which of them are the
// last of their slot, and stores those. A slot's K and V are therefore written by one block, from one token, on every
// run.
//
// NOTE: there is no scratch memory, and the cache cannot hold marks, since any bits are valid keys. So each block reads
// the slots of all later tokens. They come from L2: for 16k tokens and i32 slots 16 MB in all, beside 134 MB of stores
// and loads of keys and values (8 heads of 128).
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ffi/base/cuda_status.h"
#include "ffi/device/aligned_vector.h"
#include "ffi/device/cache_slots.cuh"
#include "ffi/device/dispatch.cuh"
#include "ffi/device/fast_divisor.h"
#include "ffi/ops/reshape_and_cache/reshape_and_cache.h"

namespace xla_gpu {
namespace {

constexpr int kReshapeThreads = 256;
constexpr int64_t kWantedReshapeBlocks = 512;
constexpr int kReshapeTogether = 4;  // vectors of a thread that are loaded before the first is stored

// How elements are stored. kBits: as they are, in a cache of the same dtype. kFloat8: divided by a scale, saturated;
// the cache's format is a parameter, so that one kernel serves both.
enum class Storage { kBits, kFloat8 };

template <typename T, Storage kStorage, int kVec>
__global__ void __launch_bounds__(kReshapeThreads)
    ReshapeAndCacheKernel(const __grid_constant__ ReshapeAndCacheParams params, int tokens_per_block,
                          FastDivisor by_vectors_per_row, FastDivisor by_vectors_per_head) {
  __shared__ LatestTokens latest;
  __shared__ int64_t destinations[kMaxTokensPerBlock];  // element offset of the token's slot; -1: nothing to store

  const auto slot_of = [&params](int64_t token) -> int64_t {
    return params.slots_are_64_bit ? static_cast<const int64_t*>(params.slot_mapping)[token]
                                   : static_cast<const int32_t*>(params.slot_mapping)[token];
  };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int count = static_cast<int>(min(static_cast<int64_t>(tokens_per_block), params.num_slots - first));
  const CacheSlots slots = {params.num_slots, params.num_pages * params.page_size, params.page_size, params.page_stride,
                            params.slot_stride};
  if (tokens_per_block == 1) {
    const int64_t destination = FindDestination<kReshapeThreads>(slot_of, first, slots);
    if (threadIdx.x == 0) destinations[0] = destination;
    __syncthreads();
  } else {
    FindDestinations<kReshapeThreads>(slot_of, first, count, slots, &latest, destinations);
  }

  // The block's tokens × {K, V} × vectors of kVec elements.
  using C = std::conditional_t<kStorage == Storage::kBits, T, uint8_t>;
  using Source = AlignedVector<T, kVec>;
  using Stored = AlignedVector<C, kVec>;
  const unsigned vectors_per_head = by_vectors_per_head.divisor;
  const unsigned vectors_per_row = by_vectors_per_row.divisor;
  const Source* const key = static_cast<const Source*>(params.key) + first * vectors_per_row;
  const Source* const value = static_cast<const Source*>(params.value) + first * vectors_per_row;
  // Element offset in the cache of vector i, or -1; its head and its place among the vectors of K or V.
  const auto find = [&](unsigned i, int64_t* source, unsigned* head, bool* is_value) -> int64_t {
    const unsigned row = by_vectors_per_row.Divide(i);
    const unsigned vector = i - row * vectors_per_row;
    *head = by_vectors_per_head.Divide(vector);
    *is_value = row % 2 != 0;
    *source = static_cast<int64_t>(row / 2) * vectors_per_row + vector;
    const int64_t destination = destinations[row / 2];
    if (destination < 0) return -1;
    return destination + *head * params.head_stride + static_cast<int64_t>(vector - *head * vectors_per_head) * kVec;
  };
  const unsigned end = count * 2 * vectors_per_row;
  for (unsigned i = threadIdx.x; i < end; i += kReshapeTogether * kReshapeThreads) {
    // All loads before the stores, which might write what the loads read as far as the compiler knows.
    Source loaded[kReshapeTogether];
    int64_t at[kReshapeTogether];
    unsigned head[kReshapeTogether];
    bool is_value[kReshapeTogether];
#pragma unroll
    for (int k = 0; k < kReshapeTogether; ++k) {
      at[k] = -1;
      if (i + k * kReshapeThreads >= end) continue;
      int64_t source;
      at[k] = find(i + k * kReshapeThreads, &source, &head[k], &is_value[k]);
      if (at[k] >= 0) loaded[k] = (is_value[k] ? value : key)[source];
    }
#pragma unroll
    for (int k = 0; k < kReshapeTogether; ++k) {
      if (at[k] < 0) continue;
      Stored stored;
      if constexpr (kStorage == Storage::kBits) {
        stored = loaded[k];
      } else {
        const float scale = (is_value[k] ? params.v_scale : params.k_scale)[params.scale_per_head ? head[k] : 0];
        const auto store = [&](__nv_fp8_interpretation_t format) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) stored.values[j] = ToFloat8(loaded[k].values[j], scale, format);
        };
        if (params.cache_dtype == DType::kF8E4M3FN) {
          store(__NV_E4M3);
        } else {
          store(__NV_E5M2);
        }
      }
      *reinterpret_cast<Stored*>(static_cast<C*>(is_value[k] ? params.v_cache : params.k_cache) + at[k]) = stored;
    }
  }
}

// Whether each vector of `vec` elements is aligned to its size, on both sides.
bool IsAligned(const ReshapeAndCacheParams& params, int vec) {
  const auto source = reinterpret_cast<uintptr_t>(params.key) | reinterpret_cast<uintptr_t>(params.value);
  const auto stored = reinterpret_cast<uintptr_t>(params.k_cache) | reinterpret_cast<uintptr_t>(params.v_cache);
  const int64_t elements = params.head_dim | params.page_stride | params.slot_stride | params.head_stride;
  return source % (vec * SizeOf(params.dtype)) == 0 && stored % (vec * SizeOf(params.cache_dtype)) == 0 &&
         elements % vec == 0;
}

template <typename T, Storage kStorage>
Status LaunchTyped(const ReshapeAndCacheParams& params, Stream stream) {
  constexpr int kVec = 16 / sizeof(T);
  int64_t tokens_per_block = (params.num_slots + kWantedReshapeBlocks - 1) / kWantedReshapeBlocks;
  tokens_per_block = std::min<int64_t>(tokens_per_block, kMaxTokensPerBlock);
  // The vectors of one block are counted in 32 bits.
  const int64_t row = 2 * params.num_kv_heads * params.head_dim;
  tokens_per_block = std::max<int64_t>(1, std::min(tokens_per_block, (int64_t{1} << 31) / row));
  const int64_t blocks = (params.num_slots + tokens_per_block - 1) / tokens_per_block;
  if (row >= int64_t{1} << 31 || blocks >= int64_t{1} << 31) {
    return Status::InvalidArgument(
        "reshape_and_cache: key: expected fewer than 2^31 elements in a token and 2^38 tokens");
  }
  const bool aligned = IsAligned(params, kVec);
  const int64_t vectors_per_head = params.head_dim / (aligned ? kVec : 1);
  const auto kernel = aligned ? ReshapeAndCacheKernel<T, kStorage, kVec> : ReshapeAndCacheKernel<T, kStorage, 1>;
  kernel<<<static_cast<unsigned>(blocks), kReshapeThreads, /*shared_mem=*/0, stream>>>(
      params, static_cast<int>(tokens_per_block), FastDivisor::Make(params.num_kv_heads * vectors_per_head),
      FastDivisor::Make(vectors_per_head));
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

template <typename T>
Status LaunchCache(const ReshapeAndCacheParams& params, Stream stream) {
  if (params.cache_dtype == params.dtype) {
    // Only the bits matter, so one kernel serves all types of a size.
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    return LaunchTyped<Bits, Storage::kBits>(params, stream);
  }
  if (params.k_scale == nullptr || params.v_scale == nullptr) {
    return Status::InvalidArgument("reshape_and_cache: k_scale, v_scale: expected with a float8 kv_cache, got none");
  }
  if (IsFloat8(params.cache_dtype)) return LaunchTyped<T, Storage::kFloat8>(params, stream);
  return Status::InvalidArgument("reshape_and_cache: kv_cache: expected the dtype of key or a float8 one, got another");
}

}  // namespace

Status LaunchReshapeAndCache(const ReshapeAndCacheParams& params, Stream stream) {
  if (params.num_slots == 0 || params.num_kv_heads == 0 || params.head_dim == 0) return Status::Ok();
  if (params.num_pages == 0 || params.page_size == 0) return Status::Ok();
  return DispatchFloat(params.dtype, "reshape_and_cache: key",
                       [&](auto zero) { return LaunchCache<decltype(zero)>(params, stream); });
}

}  // namespace xla_gpu
