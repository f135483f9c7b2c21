// Storing new tokens in a paged KV cache: the slot mapping, and the cache's elements.
#ifndef XLA_GPU_HOST_CACHE_SLOTS_H_
#define XLA_GPU_HOST_CACHE_SLOTS_H_

#include <cstdint>
#include <cstring>
#include <string>

#include "ffi/base/status.h"
#include "ffi/host/convert.h"

namespace xla_gpu {

inline int64_t SlotAt(const void* slot_mapping, bool slots_are_64_bit, int64_t token) {
  return slots_are_64_bit ? static_cast<const int64_t*>(slot_mapping)[token]
                          : static_cast<const int32_t*>(slot_mapping)[token];
}

// Returns InvalidArgument, naming the token, for a slot past the cache.
inline Status CheckSlots(const std::string& op, const void* slot_mapping, bool slots_are_64_bit, int64_t num_slots,
                         int64_t num_cache_slots) {
  for (int64_t token = 0; token < num_slots; ++token) {
    const int64_t slot = SlotAt(slot_mapping, slots_are_64_bit, token);
    if (slot < num_cache_slots) continue;
    return Status::InvalidArgument(
        op + ": slot_mapping[" + std::to_string(token) + "] (token " + std::to_string(token) +
        "): expected a slot below num_pages * page_size = " + std::to_string(num_cache_slots) +
        ", or a negative one to skip the token, got " + std::to_string(slot));
  }
  return Status::Ok();
}

struct ToE4M3FN {
  static uint8_t Store(float value) { return FloatToFloat8E4M3FN(value); }
};
struct ToE5M2 {
  static uint8_t Store(float value) { return FloatToFloat8E5M2(value); }
};

// Stores one head's row of one token.
using StoreRowFunction = void(const void* from, float scale, int64_t head_dim, void* to);

template <class Element>
void CopyRow(const void* from, float, int64_t head_dim, void* to) {
  std::memcpy(to, from, head_dim * sizeof(typename Element::Stored));
}

template <class From, class To>
void QuantizeRow(const void* from, float scale, int64_t head_dim, void* to) {
  const auto* values = static_cast<const typename From::Stored*>(from);
  auto* stored = static_cast<uint8_t*>(to);
  for (int64_t d = 0; d < head_dim; ++d) stored[d] = To::Store(From::Load(values[d]) / scale);
}

inline StoreRowFunction* SelectStoreRow(DType dtype, DType cache_dtype) {
  return WithElement(dtype, [&](auto element) -> StoreRowFunction* {
    using From = decltype(element);
    if (cache_dtype == DType::kF8E4M3FN) return &QuantizeRow<From, ToE4M3FN>;
    if (cache_dtype == DType::kF8E5M2) return &QuantizeRow<From, ToE5M2>;
    return &CopyRow<From>;
  });
}

}  // namespace xla_gpu

#endif  // XLA_GPU_HOST_CACHE_SLOTS_H_
