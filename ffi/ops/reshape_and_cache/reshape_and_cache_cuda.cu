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
#include "ffi/ops/reshape_and_cache/reshape_and_cache.h"

namespace xla_gpu {
namespace {

constexpr int kReshapeThreads = 256;
constexpr int64_t kWantedReshapeBlocks = 512;

// How elements are stored. kBits: as they are, in a cache of the same dtype. kFloat8: divided by a scale, saturated;
// the cache's format is a parameter, so that one kernel serves both.
enum class Storage { kBits, kFloat8 };

// Slot: int32_t or int64_t. Not a parameter: the search reads slots, and a choice at each took 2 % of the time.
template <typename T, Storage kStorage, typename Slot, int kVec>
__global__ void __launch_bounds__(kReshapeThreads)
    ReshapeAndCacheKernel(const ReshapeAndCacheParams params, int tokens_per_block) {
  __shared__ LatestTokens latest;
  __shared__ int64_t destinations[kMaxTokensPerBlock];  // element offset of the token's slot; -1: nothing to store

  const Slot* const slot_mapping = static_cast<const Slot*>(params.slot_mapping);  // [num_slots]
  const auto slot_of = [slot_mapping](int64_t token) -> int64_t { return slot_mapping[token]; };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int count = static_cast<int>(min(static_cast<int64_t>(tokens_per_block), params.num_slots - first));
  FindDestinations<kReshapeThreads>(
      slot_of, first, count,
      {params.num_slots, params.num_pages * params.page_size, params.page_size, params.page_stride, params.slot_stride},
      &latest, destinations);

  // The block's tokens × {K, V} × vectors of kVec elements.
  using C = std::conditional_t<kStorage == Storage::kBits, T, uint8_t>;
  using Source = AlignedVector<T, kVec>;
  using Stored = AlignedVector<C, kVec>;
  const auto vectors_per_head = static_cast<unsigned>(params.head_dim / kVec);
  const auto vectors_per_row = static_cast<unsigned>(params.num_kv_heads) * vectors_per_head;
  const Source* const key = static_cast<const Source*>(params.key) + first * vectors_per_row;
  const Source* const value = static_cast<const Source*>(params.value) + first * vectors_per_row;
#pragma unroll 2
  for (unsigned i = threadIdx.x; i < count * 2 * vectors_per_row; i += kReshapeThreads) {
    const unsigned row = i / vectors_per_row;
    const unsigned vector = i - row * vectors_per_row;
    const unsigned token = row / 2;
    const bool is_value = row % 2 != 0;
    const int64_t destination = destinations[token];
    if (destination < 0) continue;
    const unsigned head = vector / vectors_per_head;
    const unsigned vector_of_head = vector - head * vectors_per_head;
    const Source source = (is_value ? value : key)[static_cast<int64_t>(token) * vectors_per_row + vector];
    Stored stored;
    if constexpr (kStorage == Storage::kBits) {
      stored = source;
    } else {
      const float scale = (is_value ? params.v_scale : params.k_scale)[params.scale_per_head ? head : 0];
      const auto store = [&](__nv_fp8_interpretation_t format) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) stored.values[j] = ToFloat8(source.values[j], scale, format);
      };
      if (params.cache_dtype == DType::kF8E4M3FN) {
        store(__NV_E4M3);
      } else {
        store(__NV_E5M2);
      }
    }
    C* const cache = static_cast<C*>(is_value ? params.v_cache : params.k_cache);
    C* const target = cache + destination + head * params.head_stride + static_cast<int64_t>(vector_of_head) * kVec;
    *reinterpret_cast<Stored*>(target) = stored;
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

template <typename T, Storage kStorage, typename Slot>
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
  const auto kernel = IsAligned(params, kVec) ? ReshapeAndCacheKernel<T, kStorage, Slot, kVec>
                                              : ReshapeAndCacheKernel<T, kStorage, Slot, 1>;
  kernel<<<static_cast<unsigned>(blocks), kReshapeThreads, /*shared_mem=*/0, stream>>>(
      params, static_cast<int>(tokens_per_block));
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

template <typename T, Storage kStorage>
Status LaunchSlots(const ReshapeAndCacheParams& params, Stream stream) {
  return params.slots_are_64_bit ? LaunchTyped<T, kStorage, int64_t>(params, stream)
                                 : LaunchTyped<T, kStorage, int32_t>(params, stream);
}

template <typename T>
Status LaunchCache(const ReshapeAndCacheParams& params, Stream stream) {
  if (params.cache_dtype == params.dtype) {
    // Only the bits matter, so one kernel serves all types of a size.
    using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    return LaunchSlots<Bits, Storage::kBits>(params, stream);
  }
  if (params.k_scale == nullptr || params.v_scale == nullptr) {
    return Status::InvalidArgument("reshape_and_cache: k_scale, v_scale: expected with a float8 kv_cache, got none");
  }
  if (IsFloat8(params.cache_dtype)) return LaunchSlots<T, Storage::kFloat8>(params, stream);
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
