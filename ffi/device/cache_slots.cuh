// Storing new tokens in a paged KV cache: which token's K and V each slot gets, and the cache's elements.
#ifndef XLA_GPU_DEVICE_CACHE_SLOTS_CUH_
#define XLA_GPU_DEVICE_CACHE_SLOTS_CUH_

#include <cuda_fp8.h>

#include <cstdint>

namespace xla_gpu {

constexpr int kMaxTokensPerBlock = 128;
constexpr int kSlotTableSize = 512;  // a power of two, 4 × the tokens: probes are short
constexpr unsigned kSlotFilterBits = 16384;

// value / scale, rounded to nearest and saturated.
template <typename T>
__device__ __forceinline__ uint8_t ToFloat8(T value, float scale, __nv_fp8_interpretation_t format) {
  const float scaled = static_cast<float>(value) / scale;
  // The hardware's NaN has no sign, and in e5m2 another payload than the host's.
  if (isnan(scaled)) return (signbit(scaled) ? 0x80 : 0) | (format == __NV_E4M3 ? 0x7f : 0x7e);
  return format == __NV_E4M3 ? __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3)
                             : __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E5M2);
}

__device__ __forceinline__ unsigned SlotBucket(unsigned long long slot) {
  return static_cast<unsigned>((slot * 0x9E3779B97F4A7C15ull) >> 32) % kSlotTableSize;
}

// The latest token of each slot that this block's tokens name. Open addressing; an empty entry holds kEmpty, which is
// no slot, since those are not negative.
struct LatestTokens {
  static constexpr unsigned long long kEmpty = ~0ull;
  unsigned long long slots[kSlotTableSize];
  int64_t tokens[kSlotTableSize];
  uint32_t filter[kSlotFilterBits / 32];  // a bit for each slot of the table, modulo the number of bits

  __device__ void Insert(int64_t slot) {
    const auto key = static_cast<unsigned long long>(slot);
    atomicOr(&filter[key % kSlotFilterBits / 32], 1u << (key % 32));
    for (unsigned i = SlotBucket(key);; i = (i + 1) % kSlotTableSize) {
      const unsigned long long found = atomicCAS(&slots[i], kEmpty, key);
      if (found == kEmpty || found == key) return;
    }
  }
  // False for nearly all slots that are not in the table, at a few instructions.
  __device__ bool MayHave(int64_t slot) const {
    const auto bit = static_cast<unsigned>(slot) % kSlotFilterBits;
    return (filter[bit / 32] >> (bit % 32) & 1) != 0;
  }
  // The entry of `slot`, or -1.
  __device__ int Find(int64_t slot) const {
    const auto key = static_cast<unsigned long long>(slot);
    for (unsigned i = SlotBucket(key);; i = (i + 1) % kSlotTableSize) {
      if (slots[i] == key) return static_cast<int>(i);
      if (slots[i] == kEmpty) return -1;
    }
  }
};

struct CacheSlots {
  int64_t num_slots;    // entries of the slot mapping
  int64_t cache_slots;  // num_pages * page_size
  int64_t page_size;
  int64_t page_stride;  // elements, as the next
  int64_t slot_stride;
};

// Where in the cache a slot begins, in elements.
__device__ __forceinline__ int64_t SlotOffset(int64_t slot, const CacheSlots& slots) {
  // Division in 64 bits takes a few hundred cycles.
  if (((slot | slots.page_size) >> 32) == 0) {
    const auto slot32 = static_cast<uint32_t>(slot), page_size = static_cast<uint32_t>(slots.page_size);
    const uint32_t page = slot32 / page_size;
    return page * slots.page_stride + (slot32 - page * page_size) * slots.slot_stride;
  }
  return slot / slots.page_size * slots.page_stride + slot % slots.page_size * slots.slot_stride;
}

// As FindDestinations for a CTA with one token, without a table: every thread compares some of the later tokens' slots.
template <int kThreads, typename SlotOf>
__device__ __forceinline__ int64_t FindDestination(const SlotOf& slot_of, int64_t token, const CacheSlots& slots) {
  if (token >= slots.num_slots) return -1;
  const int64_t slot = slot_of(token);
  bool overwritten = false;
#pragma unroll 4
  for (int64_t later = token + 1 + threadIdx.x; later < slots.num_slots; later += kThreads) {
    overwritten |= slot_of(later) == slot;
  }
  if (__syncthreads_or(overwritten) || slot < 0 || slot >= slots.cache_slots) return -1;
  return SlotOffset(slot, slots);
}

// For the CTA's tokens [first, first + count), all of them below slots.num_slots: the element offset of the token's
// slot, or -1 where there is nothing to store: the slot is no slot of the cache, or a later token has the same one.
// `slot_of(token)` reads the slot mapping. A slot's K and V are therefore from one token, on every run.
template <int kThreads, typename SlotOf>
__device__ __forceinline__ void FindDestinations(const SlotOf& slot_of, int64_t first, int count,
                                                 const CacheSlots& slots, LatestTokens* latest, int64_t* destinations) {
  for (int i = threadIdx.x; i < kSlotTableSize; i += kThreads) {
    latest->slots[i] = LatestTokens::kEmpty;
    latest->tokens[i] = -1;
  }
  for (int i = threadIdx.x; i < static_cast<int>(kSlotFilterBits / 32); i += kThreads) latest->filter[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int64_t slot = slot_of(first + i);
    if (slot >= 0 && slot < slots.cache_slots) latest->Insert(slot);
  }
  __syncthreads();
  const auto note = [&](int64_t token, int64_t slot) {
    if (slot < 0 || !latest->MayHave(slot)) return;
    const int entry = latest->Find(slot);
    if (entry >= 0) atomicMax(reinterpret_cast<long long*>(&latest->tokens[entry]), static_cast<long long>(token));
  };
  constexpr int kTogether = 8;  // loads before the first result is looked at
  int64_t token = first + threadIdx.x;
  for (; token + (kTogether - 1) * kThreads < slots.num_slots; token += kTogether * kThreads) {
    int64_t later[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) later[i] = slot_of(token + i * kThreads);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) note(token + i * kThreads, later[i]);
  }
  for (; token < slots.num_slots; token += kThreads) note(token, slot_of(token));
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int64_t slot = slot_of(first + i);
    const bool in_cache = slot >= 0 && slot < slots.cache_slots;
    const bool store = in_cache && latest->tokens[latest->Find(slot)] == first + i;
    destinations[i] = store ? SlotOffset(slot, slots) : -1;
  }
  __syncthreads();
}

}  // namespace xla_gpu

#endif  // XLA_GPU_DEVICE_CACHE_SLOTS_CUH_
