// concat_and_cache_mla on a GPU, in one launch, as reshape_and_cache: a block takes a few consecutive tokens, finds out
// which of them are the last of their slot, and stores those. A slot is therefore written by one block, from one token,
// on every run.
#include <algorithm>
#include <cstdint>
#include <string>

#include "ffi/base/cuda_status.h"
#include "ffi/device/aligned_vector.h"
#include "ffi/device/cache_slots.cuh"
#include "ffi/device/fast_divisor.h"
#include "ffi/ops/concat_and_cache_mla/concat_and_cache_mla.h"

namespace xla_gpu {
namespace {

constexpr int kLatentThreads = 256;
constexpr int64_t kWantedLatentBlocks = 512;
constexpr int kLatentsTogether = 4;  // vectors of a thread that are loaded before the first is stored

// Only the bits matter: rows are of vectors of 16 bytes or, where addresses are not aligned to those, of 2.
template <typename Vector>
__global__ void __launch_bounds__(kLatentThreads)
    ConcatAndCacheMlaKernel(const __grid_constant__ ConcatAndCacheMlaParams params, int tokens_per_block,
                            int latent_vectors, FastDivisor by_vectors_per_row) {
  __shared__ LatestTokens latest;
  __shared__ int64_t destinations[kMaxTokensPerBlock];  // vector offset of the token's slot; -1: nothing to store

  const auto slot_of = [&params](int64_t token) -> int64_t {
    return params.slots_are_64_bit ? static_cast<const int64_t*>(params.slot_mapping)[token]
                                   : static_cast<const int32_t*>(params.slot_mapping)[token];
  };
  const unsigned vectors_per_row = by_vectors_per_row.divisor;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * tokens_per_block;
  const int count = static_cast<int>(min(static_cast<int64_t>(tokens_per_block), params.num_slots - first));
  const CacheSlots slots = {params.num_slots, params.num_pages * params.page_size, params.page_size,
                            params.page_size * static_cast<int64_t>(vectors_per_row),
                            static_cast<int64_t>(vectors_per_row)};
  if (tokens_per_block == 1) {
    const int64_t destination = FindDestination<kLatentThreads>(slot_of, first, slots);
    if (threadIdx.x == 0) destinations[0] = destination;
    __syncthreads();
  } else {
    FindDestinations<kLatentThreads>(slot_of, first, count, slots, &latest, destinations);
  }

  // The block's tokens × the vectors of a row.
  const unsigned rope_vectors = vectors_per_row - latent_vectors;
  const Vector* const kv_c = static_cast<const Vector*>(params.kv_c) + first * latent_vectors;
  const Vector* const k_pe = static_cast<const Vector*>(params.k_pe) + first * rope_vectors;
  Vector* const kv_cache = static_cast<Vector*>(params.kv_cache);
  const unsigned end = count * vectors_per_row;
  for (unsigned i = threadIdx.x; i < end; i += kLatentsTogether * kLatentThreads) {
    // All loads before the stores, which might write what the loads read as far as the compiler knows.
    Vector loaded[kLatentsTogether];
    int64_t at[kLatentsTogether];
#pragma unroll
    for (int k = 0; k < kLatentsTogether; ++k) {
      at[k] = -1;
      const unsigned vector = i + k * kLatentThreads;
      if (vector >= end) continue;
      const unsigned token = by_vectors_per_row.Divide(vector);
      const unsigned column = vector - token * vectors_per_row;
      if (destinations[token] < 0) continue;
      at[k] = destinations[token] + column;
      loaded[k] = column < static_cast<unsigned>(latent_vectors)
                      ? kv_c[static_cast<int64_t>(token) * latent_vectors + column]
                      : k_pe[static_cast<int64_t>(token) * rope_vectors + column - latent_vectors];
    }
#pragma unroll
    for (int k = 0; k < kLatentsTogether; ++k) {
      if (at[k] >= 0) kv_cache[at[k]] = loaded[k];
    }
  }
}

template <typename Vector>
Status LaunchVectors(const ConcatAndCacheMlaParams& params, Stream stream) {
  const int64_t size = SizeOf(params.dtype);
  const int64_t latent_vectors = params.kv_lora_rank * size / sizeof(Vector);
  const int64_t row_vectors = latent_vectors + params.rope_dim * size / sizeof(Vector);
  int64_t tokens_per_block = (params.num_slots + kWantedLatentBlocks - 1) / kWantedLatentBlocks;
  // The vectors of one block are counted in 32 bits.
  tokens_per_block = std::min(std::min<int64_t>(tokens_per_block, kMaxTokensPerBlock),
                              std::max<int64_t>(1, (int64_t{1} << 30) / row_vectors));
  const int64_t blocks = (params.num_slots + tokens_per_block - 1) / tokens_per_block;
  if (row_vectors >= int64_t{1} << 30 || blocks >= int64_t{1} << 31) {
    return Status::InvalidArgument(
        "concat_and_cache_mla: kv_c: expected fewer than 2^29 elements in a token, k_pe's included, and 2^38 tokens, "
        "got " +
        std::to_string(params.kv_lora_rank + params.rope_dim) + " and " + std::to_string(params.num_slots));
  }
  ConcatAndCacheMlaKernel<Vector><<<static_cast<unsigned>(blocks), kLatentThreads, /*shared_mem=*/0, stream>>>(
      params, static_cast<int>(tokens_per_block), static_cast<int>(latent_vectors), FastDivisor::Make(row_vectors));
  XLA_GPU_RETURN_IF_LAUNCH_FAILED();
  return Status::Ok();
}

}  // namespace

Status LaunchConcatAndCacheMla(const ConcatAndCacheMlaParams& params, Stream stream) {
  if (params.num_slots == 0 || params.num_pages == 0) return Status::Ok();
  // Both widths are multiples of 8 elements, and so of 16 bytes.
  const auto addresses = reinterpret_cast<uintptr_t>(params.kv_c) | reinterpret_cast<uintptr_t>(params.k_pe) |
                         reinterpret_cast<uintptr_t>(params.kv_cache);
  if (addresses % 16 == 0) return LaunchVectors<AlignedVector<uint32_t, 4>>(params, stream);
  return LaunchVectors<uint16_t>(params, stream);
}

}  // namespace xla_gpu
