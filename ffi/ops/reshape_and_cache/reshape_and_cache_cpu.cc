#include <cstdint>

#include "ffi/host/cache_slots.h"
#include "ffi/host/float_mode.h"
#include "ffi/host/parallel_for.h"
#include "ffi/ops/reshape_and_cache/reshape_and_cache.h"

namespace xla_gpu {
namespace {

// Below so many bytes a second thread's wake-up costs more than it saves.
constexpr int64_t kMinParallelBytes = int64_t{1} << 17;

// Stores K (or V) of one head, token after token, so that of duplicate slots the last one stays.
void StoreHead(const ReshapeAndCacheParams& params, bool is_key, int64_t head, StoreRowFunction* store_row) {
  const auto* from = static_cast<const char*>(is_key ? params.key : params.value);
  auto* to = static_cast<char*>(is_key ? params.k_cache : params.v_cache);
  const float* scales = is_key ? params.k_scale : params.v_scale;
  const float scale = scales != nullptr ? scales[params.scale_per_head ? head : 0] : 1.0f;
  const int64_t from_size = SizeOf(params.dtype);
  const int64_t to_size = SizeOf(params.cache_dtype);
  for (int64_t token = 0; token < params.num_slots; ++token) {
    const int64_t slot = SlotAt(params.slot_mapping, params.slots_are_64_bit, token);
    if (slot < 0) continue;
    const int64_t element = slot / params.page_size * params.page_stride +
                            slot % params.page_size * params.slot_stride + head * params.head_stride;
    store_row(from + (token * params.num_kv_heads + head) * params.head_dim * from_size, scale, params.head_dim,
              to + element * to_size);
  }
}

}  // namespace

Status CheckReshapeAndCacheSlots(const ReshapeAndCacheParams& params) {
  return CheckSlots("reshape_and_cache", params.slot_mapping, params.slots_are_64_bit, params.num_slots,
                    params.num_pages * params.page_size);
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
