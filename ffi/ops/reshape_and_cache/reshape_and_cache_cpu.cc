#include <cstdint>
#include <cstring>
#include <string>

#include "ffi/host/convert.h"
#include "ffi/host/float_mode.h"
#include "ffi/ops/reshape_and_cache/reshape_and_cache.h"

namespace xla_gpu {
namespace {

// Below so many bytes a second thread's wake-up costs more than it saves.
constexpr int64_t kMinParallelBytes = int64_t{1} << 17;

int64_t SlotOf(const ReshapeAndCacheParams& params, int64_t token) {
  return params.slots_are_64_bit ? static_cast<const int64_t*>(params.slot_mapping)[token]
                                 : static_cast<const int32_t*>(params.slot_mapping)[token];
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

StoreRowFunction* SelectStoreRow(DType dtype, DType cache_dtype) {
  return WithElement(dtype, [&](auto element) -> StoreRowFunction* {
    using From = decltype(element);
    if (cache_dtype == DType::kF8E4M3FN) return &QuantizeRow<From, ToE4M3FN>;
    if (cache_dtype == DType::kF8E5M2) return &QuantizeRow<From, ToE5M2>;
    return &CopyRow<From>;
  });
}

// Stores K (or V) of one head, token after token, so that of duplicate slots the last one stays.
void StoreHead(const ReshapeAndCacheParams& params, bool is_key, int64_t head, StoreRowFunction* store_row) {
  const auto* from = static_cast<const char*>(is_key ? params.key : params.value);
  auto* to = static_cast<char*>(is_key ? params.k_cache : params.v_cache);
  const float* scales = is_key ? params.k_scale : params.v_scale;
  const float scale = scales != nullptr ? scales[params.scale_per_head ? head : 0] : 1.0f;
  const int64_t from_size = SizeOf(params.dtype);
  const int64_t to_size = SizeOf(params.cache_dtype);
  for (int64_t token = 0; token < params.num_slots; ++token) {
    const int64_t slot = SlotOf(params, token);
    if (slot < 0) continue;
    const int64_t element = slot / params.page_size * params.page_stride +
                            slot % params.page_size * params.slot_stride + head * params.head_stride;
    store_row(from + (token * params.num_kv_heads + head) * params.head_dim * from_size, scale, params.head_dim,
              to + element * to_size);
  }
}

}  // namespace

Status CheckReshapeAndCacheSlots(const ReshapeAndCacheParams& params) {
  const int64_t num_cache_slots = params.num_pages * params.page_size;
  for (int64_t token = 0; token < params.num_slots; ++token) {
    const int64_t slot = SlotOf(params, token);
    if (slot < num_cache_slots) continue;
    return Status::InvalidArgument(
        "reshape_and_cache: slot_mapping[" + std::to_string(token) + "] (token " + std::to_string(token) +
        "): expected a slot below num_pages * page_size = " + std::to_string(num_cache_slots) +
        ", or a negative one to skip the token, got " + std::to_string(slot));
  }
  return Status::Ok();
}

Status RunReshapeAndCache(const ReshapeAndCacheParams& params, const Executor& executor) {
  StoreRowFunction* const store_row = SelectStoreRow(params.dtype, params.cache_dtype);
  // An item is K or V of one head: items share no cache row, whatever the slots.
  const auto store_item = [&](int64_t item) {
    const ScopedFloatMode mode;
    StoreHead(params, item % 2 == 0, item / 2, store_row);
  };
  const int64_t items = 2 * params.num_kv_heads;
  const int64_t bytes = params.num_slots * items * params.head_dim * static_cast<int64_t>(SizeOf(params.dtype));
  if (bytes < kMinParallelBytes) {
    for (int64_t item = 0; item < items; ++item) store_item(item);
  } else {
    ParallelFor(executor, items, store_item);
  }
  return Status::Ok();
}

}  // namespace xla_gpu
